"""The container recipe as far as it can be checked without building it: files that are there, versions that agree."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

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


# In the place of python: makes itself the interpreter of a virtual environment, and notes what pip is to install.
PYTHON = """#!/bin/sh
case "$*" in
*"-m venv"*) mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
*"$FAILS"*) exit 1 ;;
esac
echo "$*" >>pip.txt
"""


@pytest.mark.parametrize(("gpu", "fails"), [(True, "nothing"), (True, "transformer-engine"), (False, "nothing")])
def test_make_installs_the_servers_torch_and_transformer_engine_where_there_is_a_gpu(gpu, fails, tmp_path):
    if not gpu and shutil.which("nvidia-smi"):
        pytest.skip("this machine has a GPU")
    (tmp_path / "tools").mkdir()
    for name in ("Makefile", "setup.py", "tools/build_transformer_engine.sh"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    for name in ("python", *(["nvidia-smi"] if gpu else [])):
        (tmp_path / name).write_text(PYTHON)
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "FAILS": fails}
    environment = {name: value for name, value in environment.items() if not name.startswith("MAKE")}
    command = ["make", "setup", f"PYTHON={tmp_path}/python"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    words = (tmp_path / "pip.txt").read_text().split()
    locked = (tmp_path / ".venv" / "lock.txt").read_text()
    assert (f"torch=={pins('gpu_server.txt')['torch']}" in words) == gpu and ("triton==" in locked) != gpu
    built = f"transformer-engine[core_cu13,pytorch]=={pins('gpu_trainer.txt')['transformer-engine']}"
    assert (built in words) == (gpu and fails == "nothing")
    assert ("WARNING: TransformerEngine could not be built" in done.stderr) == (fails != "nothing")


def test_what_is_slow_without_transformer_engine_is_noted_where_there_is_a_gpu(check, monkeypatch):
    def notes() -> list[str]:
        return [text for level, text in check("versions") if level == "note" and "transformer-engine" in text]

    assert not notes()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (said,) = notes()
    assert said.startswith("WITHOUT transformer-engine: training may take two to three times as long")


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
    assert [pins("megatron.txt")["megatron-core"]] == [v for p in TRAINER for v in p.tested_too]


def test_the_trainers_pins_are_the_locks():
    lock = pins("lock.txt")
    for name, version in pins("gpu_trainer.txt").items():
        if name in lock and name not in ALLOWED_TO_DIFFER:
            assert lock[name] == version, name
    assert set(pins("gpu_trainer.txt")) - set(lock) == {"torch", "transformer-engine", "wandb"}
