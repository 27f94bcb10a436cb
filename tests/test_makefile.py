"""What `make` sets up anew, and which part of the full tier it runs."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SET_UP_FROM = ("setup.py", "requirements/lock.txt", "requirements/sglang_cpu.txt")
FOR_GPUS = ("requirements/gpu_server.txt", "requirements/gpu_trainer.txt")


@pytest.fixture
def checkout(tmp_path):
    """The Makefile and what it reads, with an environment that has just been set up."""
    folder = tmp_path / "checkout"
    for name in ("Makefile", *SET_UP_FROM, *FOR_GPUS):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
        os.utime(folder / name, (1e9, 1e9))
    (folder / ".venv").mkdir()
    (folder / ".venv" / ".installed").touch()
    return folder


def make(folder: Path, *words: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKELEVEL", "MAKEFLAGS")}
    return subprocess.run(["make", *words], cwd=folder, capture_output=True, text=True, timeout=60, env=environment)


@pytest.mark.parametrize(("gpu", "watched"), [("", SET_UP_FROM), ("nvidia-smi", (*SET_UP_FROM, *FOR_GPUS))])
def test_the_environment_is_set_up_anew_when_its_requirements_change(checkout, gpu, watched):
    for name in (*SET_UP_FROM, *FOR_GPUS):
        assert make(checkout, "-q", "setup", f"GPU={gpu}").returncode == 0
        os.utime(checkout / name, (4e9, 4e9))
        assert make(checkout, "-q", "setup", f"GPU={gpu}").returncode == (name in watched), name
        os.utime(checkout / name, (1e9, 1e9))


def git(folder: Path, *words: str) -> str:
    own = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *own, *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def part(folder: Path) -> str:
    return make(folder, "test-shard", "MAKE=echo").stdout.split()[-1]


def test_every_commit_runs_a_part_of_its_own_in_a_shallow_clone_too(checkout, tmp_path):
    git(checkout, "init", "-q")
    git(checkout, "add", "Makefile")
    for number in range(1, 5):
        git(checkout, "commit", "-q", "--allow-empty", "-m", f"commit {number}")
        assert part(checkout) == f"SHARD={number % 12 + 1}/12"
        shallow = tmp_path / f"shallow {number}"
        git(tmp_path, "clone", "-q", "--depth", "1", checkout.as_uri(), str(shallow))
        assert part(shallow) == f"SHARD={int(git(shallow, 'rev-parse', 'HEAD')[:7], 16) % 12 + 1}/12"
