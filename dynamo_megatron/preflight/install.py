"""`dynamo-megatron preflight --install`: shows what this environment (a venv, a container) lacks, without a config."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch

from dynamo_megatron.errors import InputError
from dynamo_megatron.preflight.findings import Check, Finding, note, ok, run_checks, skipped
from dynamo_megatron.preflight.machine_checks import (
    optional_packages,
    server_versions,
    torch_of_both,
    trainer_faults,
    trainer_version,
)
from dynamo_megatron.preflight.tested import SERVER, TRAINER, Package, faults, installed

PROGRAMS = {
    "sbatch": "SLURM: `launch slurm`",
    "srun": "SLURM: starts a task a rank",
    "enroot": "unprivileged containers, what pyxis runs",
    "apptainer": "unprivileged containers without pyxis",
}


def report(python: str | None) -> int:
    """Prints what is installed and what is not. Returns the exit code, 1 where something needed is missing or too old.

    `python`: the server's interpreter; None: this one."""
    python = python or sys.executable
    checks: list[tuple[str, Check]] = [
        ("python", interpreter),
        ("gpu", gpu),
        ("trainer", trainer),
        ("server", partial(server, python)),
        ("cluster", cluster),
    ]
    count = run_checks(checks, lambda name, found, _: print(f"{found.level:<7} {name}: {found.text}", flush=True))
    print(f"{count} of {len(checks)} parts lack something needed" if count else "nothing that is needed is missing")
    return 1 if count else 0


def interpreter() -> Iterator[Finding]:
    yield ok(f"{sys.executable}, Python {platform.python_version()}")


def gpu() -> Iterator[Finding]:
    """The driver, torch's CUDA version, and the compiler for building transformer-engine and apex."""
    driver = _said("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    nvcc = re.search(r"release ([\d.]+)", _said("nvcc", "--version") or "")
    toolkit = f"nvcc {nvcc[1]}" if nvcc else "no nvcc: needed only to build transformer-engine or apex"
    if driver is None:
        yield skipped(f"no NVIDIA driver on this machine; torch {torch.__version__}; {toolkit}")
        return
    yield ok(f"{'; '.join(driver.splitlines())}; torch {torch.__version__}, CUDA {torch.version.cuda}; {toolkit}")
    if torch.version.cuda is None:
        raise InputError(f"torch {torch.__version__} has no CUDA; install the CUDA build of the same version")
    if not torch.cuda.is_available():
        raise InputError(
            f"torch {torch.__version__} was built for CUDA {torch.version.cuda} and sees no GPU; the driver may be "
            "too old for it (nvidia-smi shows the newest CUDA it runs), or the container was started without GPUs"
        )
    if nvcc and nvcc[1].split(".")[0] != torch.version.cuda.split(".")[0]:
        yield note(f"nvcc {nvcc[1]} cannot build extensions for torch's CUDA {torch.version.cuda}")


def trainer() -> Iterator[Finding]:
    """The trainer's packages, and for each missing one what it is for."""
    yield from _packages(TRAINER, trainer_version)
    yield from trainer_faults()
    yield from optional_packages()


def server(python: str) -> Iterator[Finding]:
    """The server's packages in its own interpreter."""
    there = server_versions(python)
    yield from _packages(SERVER, there.get)
    where = f"the server's interpreter {python}"
    yield from faults(SERVER, there.get, where, f"{python} -m pip install", cuda=torch.cuda.is_available())
    yield from torch_of_both(there)


def cluster() -> Iterator[Finding]:
    """Programs that start jobs on many nodes."""
    for program, gives in PROGRAMS.items():
        where = shutil.which(program)
        yield ok(f"{program}: {where}") if where else skipped(f"{program}: not found ({gives})")
    if shutil.which("srun"):
        pyxis = "--container-image" in (_said("srun", "--help") or "")
        yield ok("pyxis: srun knows --container-image") if pyxis else skipped("pyxis: srun has no --container-image")


def _packages(packages: tuple[Package, ...], version_of: Callable[[str], str | None]) -> Iterator[Finding]:
    for package in packages:
        found = installed(package.name, version_of)
        if found is not None:
            yield ok(f"{package.name} {found}: {package.gives}")
        elif not package.needed or (package.gpu_only and not torch.cuda.is_available()):
            yield skipped(f"{package.name} is not installed; it gives: {package.gives}")


def _said(*command: str) -> str | None:
    """The output of a program; None where it is not installed, fails, or takes more than 20 s."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
