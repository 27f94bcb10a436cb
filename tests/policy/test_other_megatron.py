"""The other supported megatron-core (requirements/megatron.txt): the tests under it, and checkpoints of each version
under the other one."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_cases import difference, launch, settings

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-5
# Their stand-in for TransformerEngine is made for what 0.16 imports of it.
OF_GPUS = tuple(f"--ignore=tests/policy/{name}.py" for name in ("test_gpu_branch", "test_sync_lint"))


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


def test_python_finds_the_other_version(run_python):
    pinned = re.search(r"^megatron-core==(.+)$", (ROOT / "requirements" / "megatron.txt").read_text(), re.MULTILINE)[1]
    asked = "import importlib.metadata as m, megatron.core as c; print(c.__version__, m.version('megatron-core'))"
    code, metadata = run_python("-c", asked).splitlines()[-1].split()
    assert code.partition("+")[0] == metadata == pinned


@pytest.mark.parametrize(
    "words",
    [
        ("tests/policy", "-m", "not full", *OF_GPUS),
        ("tests/models", "-m", "not full"),
        ("tests/checkpoint/test_crafted.py",),
        ("tests/e2e/test_live_run.py",),
    ],
    ids=["policy", "models and conversion", "checkpoints of plain Megatron", "a live run, killed and resumed"],
)
def test_the_tests_pass_under_it(run_python, tmp_path, words):
    said = run_python("-m", "pytest", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'tests'}", *words)
    print(said.splitlines()[-1])
    assert re.search(r"\d+ passed", said.splitlines()[-1])


def test_killed_saves_lose_at_most_themselves(run_python, make_tiny_model, tmp_path):
    model = make_tiny_model(tmp_path / "model", layers=2)
    (tmp_path / "run").mkdir()
    said = run_python(Path(__file__).with_name("checkpoint_kills.py"), model, tmp_path / "run", 12, 0)
    found = json.loads(said.splitlines()[-1])
    assert found["rounds"] == 12 and found["steps"] >= 2 and found["cut_off"] >= 2


MODELS = {  # name: (family, layout that saves, layout that loads)
    "dense": ("qwen3", {"pp": 2}, {"tp": 2}),
    "experts": ("qwen3_moe", {"ep": 2}, {"pp": 2}),
}


@pytest.fixture(scope="module")
def trained(other_megatron, make_tiny_model, run_script, tmp_path_factory) -> Path:
    """A folder for each model and version that saved ("own-dense"), and one for each that the other version resumed."""
    folder = tmp_path_factory.mktemp("two-versions")
    path_of = {"own": os.environ.get("PYTHONPATH", ""), "other": other_megatron}
    straight: dict[str, list[dict]] = {version: [] for version in path_of}
    resumed: dict[str, list[dict]] = {version: [] for version in path_of}
    for name, (family, saves, loads) in MODELS.items():
        sizes = {} if family == "qwen3_moe" else {"kv_heads": 4}
        model = make_tiny_model(folder / f"{name}-model", family=family, dtype="float32", layers=4, vocab=104, **sizes)
        for version, reader, kind in (("own", "other", "sync"), ("other", "own", "async")):
            out = folder / f"{version}-{name}"
            straight[version].append({"config": settings(model, saves), "out": str(out)})
            config = settings(model, loads)
            config["optimizer"]["lr"] = 3e-6  # a run may be resumed with another learning rate
            load = str(out / kind / "step-000003")
            resumed[reader].append({"config": config, "out": f"{out}-resumed", "load": load})
    with pytest.MonkeyPatch.context() as patch:
        for what, cases in (("straight", straight), ("resumed", resumed)):
            for version, path in path_of.items():
                patch.setenv("PYTHONPATH", path)
                launch(run_script, {"ranks-2": cases[version]}, folder / f"{what}-{version}")
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_both_versions_train_alike(trained, name):
    assert difference(trained / f"own-{name}", trained / f"other-{name}") <= TOLERANCE


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("saved_by", ["own", "other"])
def test_each_version_resumes_what_the_other_saved(trained, saved_by, name):
    folder = trained / f"{saved_by}-{name}"
    assert difference(folder, folder.with_name(f"{folder.name}-resumed")) <= TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_both_versions_save_the_same_files(trained, name):
    own, other = (
        {file.name for file in (trained / f"{version}-{name}" / "sync" / "step-000003").iterdir()}
        for version in ("own", "other")
    )
    assert own == other and "common.pt" in own
