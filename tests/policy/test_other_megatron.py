"""The other supported megatron-core (requirements/megatron.txt): the tests under it, and checkpoints of each version
under the other one."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import checkpoint_cases
import pytest
from checkpoint_cases import case, difference
from rank_cases import run_cases

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def run_python(other_megatron, tmp_path) -> Callable[..., str]:
    """run_python(*words) -> the output of `python -P WORDS` under the other version. Holds that it succeeds."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**own, "PYTHONPATH": other_megatron, "OMP_NUM_THREADS": "1"}

    def run(*words: object) -> str:
        command = [sys.executable, "-P", *map(str, words)]
        with open(tmp_path / "log", "w") as log:  # not a pipe: a process that a test has left behind would hold it
            code = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log, timeout=1700).returncode
        said = (tmp_path / "log").read_text()
        assert code == 0, said[-6000:]
        return said

    return run


@pytest.mark.parametrize(
    "words",
    [("tests/policy", "-m", "not full"), ("tests/models", "-m", "not full"), ("tests/e2e/test_live_run.py",)],
    ids=["policy", "models and conversion", "a live run, killed and resumed"],
)
def test_the_tests_pass_under_it(run_python, tmp_path, words):
    pinned = re.search(r"^megatron-core==(.+)$", (ROOT / "requirements" / "megatron.txt").read_text(), re.MULTILINE)[1]
    asked = "import importlib.metadata as m, megatron.core as c; print(c.__version__, m.version('megatron-core'))"
    code, metadata = run_python("-c", asked).splitlines()[-1].split()
    assert code.partition("+")[0] == metadata == pinned
    said = run_python("-m", "pytest", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'tests'}", *words)
    print(said.splitlines()[-1])
    assert re.search(r"\d+ passed", said.splitlines()[-1])


@pytest.mark.parametrize(("own_saves", "family"), [(True, "qwen3"), (False, "qwen3_moe")])
def test_each_version_resumes_what_the_other_saved(other_megatron, make_tiny_model, tmp_path, own_saves, family):
    """In another layout, and with another learning rate."""
    sizes, experts = ({}, {"ep": 2}) if family == "qwen3_moe" else ({"kv_heads": 4}, {"tp": 2})
    model = make_tiny_model(tmp_path / "model", family=family, dtype="float32", layers=4, vocab=104, **sizes)
    versions = (os.environ.get("PYTHONPATH", ""), other_megatron)
    saver, loader = versions if own_saves else versions[::-1]
    saved = tmp_path / "saved" / ("sync" if own_saves else "async") / "step-000003"
    with pytest.MonkeyPatch.context() as patch:
        for path, one in (
            (saver, case(model, {"pp": 2}, tmp_path / "saved", ranks=2)),
            (loader, case(model, experts, tmp_path / "loaded", ranks=2, load=str(saved))),
        ):
            patch.setenv("PYTHONPATH", path)
            one["config"]["optimizer"]["lr"] = 1e-5 if "load" in one else 3e-6
            run_cases(checkpoint_cases.FILE, [one], tmp_path)
    assert difference(tmp_path / "saved", tmp_path / "loaded") <= 1e-5
    assert (saved / "common.pt").is_file()
