"""The container recipe as far as it can be checked without building it: files that are there, versions that agree."""

import re
from pathlib import Path

import pytest

from dynamo_megatron.preflight.tested import SERVER, TRAINER

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "containers" / "Dockerfile").read_text()
# docs/install.md says so: on GPUs torch is SGLang's, with a triton of its own
ALLOWED_TO_DIFFER = {"torch", "triton"}


def pins(name: str) -> dict[str, str]:
    """package (normalised) -> version of requirements/NAME's lines with ==."""
    found = {}
    for line in (ROOT / "requirements" / name).read_text().splitlines():
        if match := re.match(r"([\w.-]+)(?:\[[\w,]+\])?==(\S+)", line):
            found[normal(match[1])] = match[2]
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_copied_file_is_there_and_not_ignored():
    allowed = {
        line[1:]
        for line in (ROOT / "containers" / "Dockerfile.dockerignore").read_text().splitlines()
        if line[0] == "!"
    }
    sources = [word for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.M) for word in line.split()[:-1]]
    assert len(sources) >= 8
    for source in sources:
        assert (ROOT / source).exists(), source
        assert source.split("/")[0] in allowed, source
    for file in re.findall(r"/opt/requirements/(\w+\.txt)", DOCKERFILE):
        assert f"requirements/{file}" in sources, file


def test_the_interpreters_are_apart():
    for name in ("trainer", "sglang"):
        assert f"python3 -m venv /opt/{name}" in DOCKERFILE
    assert "rollout.python=/opt/sglang/bin/python" in DOCKERFILE and "PATH=/opt/trainer/bin" in DOCKERFILE


@pytest.mark.parametrize("file", ["gpu_trainer.txt", "gpu_server.txt"])
def test_pins_agree_with_the_tested_table(file):
    pinned, table = pins(file), TRAINER if file == "gpu_trainer.txt" else SERVER
    checked = [p for p in table if p.tested and normal(p.name) in pinned and p.name not in ALLOWED_TO_DIFFER]
    assert len(checked) >= (8 if table is TRAINER else 1)
    for package in checked:
        assert pinned[normal(package.name)] == package.tested, package.name
    for package in table:
        assert not package.needed or normal(package.name) in pinned, package.name


def test_trainer_and_server_have_one_torch():
    """Colocated servers open CUDA IPC handles of the trainer's (weight_sync/transports)."""
    assert pins("gpu_trainer.txt")["torch"] == pins("gpu_server.txt")["torch"]


def test_the_tested_table_is_what_the_tests_install():
    lock = pins("lock.txt")
    makefile = (ROOT / "Makefile").read_text()
    for package in (*TRAINER, *SERVER):
        if package.tested is None or package.name == "nemo-run":
            continue
        if package.name in ("torch", "sglang"):
            assert f"{package.name}=={package.tested}" in makefile
        else:
            assert lock[normal(package.name)] == package.tested, package.name


def test_the_trainers_pins_are_the_locks():
    lock = pins("lock.txt")
    for name, version in pins("gpu_trainer.txt").items():
        if name in lock and name not in ALLOWED_TO_DIFFER:
            assert lock[name] == version, name
    assert set(pins("gpu_trainer.txt")) - set(lock) == {"torch", "transformer-engine", "wandb"}
