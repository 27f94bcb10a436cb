"""Checkpoints that plain Megatron wrote, through the readers that run nothing of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("plain-megatron")
    with open(folder / "log", "w") as log:
        script = Path(__file__).with_name("plain_megatron_job.py")
        code = subprocess.run([sys.executable, "-P", script, folder], stdout=log, stderr=log, timeout=500).returncode
    assert code == 0, (folder / "log").read_text()[-4000:]
    return json.loads((folder / "said.json").read_text())


def test_a_checkpoint_of_plain_megatron_is_loaded(said):
    assert said["honest"] is True and said["plans"] == 1


def test_an_object_among_the_parts_runs_nothing(said):
    assert "names posix.system" in said["ours"] and not said["ours ran it"]


def test_megatron_by_itself_runs_it(said):
    """What the readers are for; once this fails they are not needed."""
    assert said["Megatron's ran it"]
