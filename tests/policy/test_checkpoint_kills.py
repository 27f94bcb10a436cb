"""SIGKILL to all ranks, or to one, at random moments of a save: the next start finds a complete one, with what
was saved."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROUNDS = 200


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_killed_save_loses_at_most_that_save(make_tiny_model, tmp_path):
    model = make_tiny_model(tmp_path / "model", layers=2)
    (tmp_path / "run").mkdir()
    script = Path(__file__).with_name("checkpoint_kills.py")
    with open(tmp_path / "log", "w+") as log:
        code = subprocess.run(
            [sys.executable, "-P", str(script), str(model), str(tmp_path / "run"), str(ROUNDS), "0"],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=3500,
        ).returncode
    assert code == 0, (tmp_path / "log").read_text()[-4000:]
    found = json.loads((tmp_path / "log").read_text().splitlines()[-1])
    print(found)
    assert found["rounds"] == ROUNDS and found["steps"] >= ROUNDS // 5
    assert found["cut_off"] >= ROUNDS // 5, "the kills came when nothing was being written"
