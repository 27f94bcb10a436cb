"""Checks the devices and the network between the ranks: one small process per rank joins an all-reduce.

`all_reduce.py` is that process.
"""

from __future__ import annotations

import glob
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch

from dynamo_megatron.errors import InputError
from dynamo_megatron.preflight.findings import Finding, failed, note, ok
from dynamo_megatron.preflight.subject import Subject

TIMEOUT = 120.0  # seconds for all ranks to start, meet and finish the all-reduce
BUSY_SHARE = 0.1  # of a GPU's memory; a note where other processes take more


def devices(subject: Subject) -> Iterator[Finding]:
    """Checks that the device of each rank computes, and that all ranks reach each other."""
    if not torch.cuda.is_available() and (sign := gpus_given()):
        raise InputError(
            f"devices: {sign}, and torch {torch.__version__} sees no GPU; install its CUDA build, see that nvidia-smi "
            "works here and the container gets the GPUs, or set CUDA_VISIBLE_DEVICES= for a run on CPUs"
        )
    if torch.cuda.is_available() and torch.cuda.device_count() < subject.ranks_here:
        raise InputError(
            f"devices: {subject.ranks_here} ranks on this node and {torch.cuda.device_count()} GPUs to be seen "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}); ask for a GPU a rank"
        )
    reports = _run_ranks(_environments(subject))
    for report in reports:
        yield from _judge(report)
    if "error" not in (first := reports[0]):
        took = ", ".join(
            f"{backend}: {one['bytes'] / 1e6:.0f} MB in {one['seconds'] * 1e3:.1f} ms"
            for backend, one in first["sums"].items()
        )
        yield ok(f"{first['device']} x {len(reports)} here: all-reduce over {first['world_size']} ranks, {took}")


def gpus_given() -> str | None:
    """A text on why this process seems to be meant to have GPUs; None where nothing says so, or GPUs are hidden."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return None if visible in ("", "-1", "NoDevFiles") else f"CUDA_VISIBLE_DEVICES is {visible}"
    if (given := os.environ.get("SLURM_GPUS_ON_NODE", "0")) != "0":
        return f"SLURM_GPUS_ON_NODE is {given}"
    files = sorted(glob.glob("/dev/nvidia[0-9]*"))
    return f"there is {files[0]}" if files else None


def _judge(report: dict[str, Any]) -> Iterator[Finding]:
    where = f"rank {report['rank']} on {socket.gethostname()}"
    if "error" in report:
        yield failed(
            f"all-reduce: {where}: {report['error']}; see that all nodes reach MASTER_ADDR:MASTER_PORT and that "
            "NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME name the interface between them"
        )
        return
    for backend, one in report["sums"].items():
        if one["sum"] != report["expected"]:
            yield failed(
                f"all-reduce: {where} has {one['sum']} instead of {report['expected']} over {backend}; leave this node "
                "out"
            )
    if report.get("taken", 0.0) > BUSY_SHARE:
        yield note(f"{where}: {report['taken']:.0%} of the GPU's memory is taken by another process (nvidia-smi)")


def _environments(subject: Subject) -> list[dict[str, str]]:
    """One environment per process to start here: one under a launcher, otherwise one for each rank on this node."""
    # With torchrun's own variables rank 0 would not serve the store but wait for torchrun's, at another port.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    inherited = {**subject.config.rank_variables(), **inherited}
    if "RANK" in inherited:
        # The next port: rank 0's own process may already use the launcher's port.
        return [{**inherited, "MASTER_PORT": str(int(inherited.get("MASTER_PORT", "29500")) + 1)}]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    here = range(subject.ranks_here)
    job = {"WORLD_SIZE": str(len(here)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return [{**inherited, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in here]


def _run_ranks(environments: list[dict[str, str]], timeout: float = TIMEOUT) -> list[dict[str, Any]]:
    """The report of each rank, or {"rank", "error"}. All ranks together have `timeout` seconds."""
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for environment in environments:
            with open(os.path.join(folder, environment["RANK"]), "w+b") as log:
                command = [sys.executable, "-P", "-m", "dynamo_megatron.preflight.all_reduce"]
                # a file, not a pipe: descendants of a killed child could keep a pipe open, and reading would not end
                started.append((subprocess.Popen(command, env=environment, stdout=log, stderr=log), log.name))
        end = time.monotonic() + timeout
        reports = []
        try:
            for (process, log), environment in zip(started, environments, strict=True):
                rank = {"rank": int(environment["RANK"])}
                try:
                    code = process.wait(max(0.1, end - time.monotonic()))
                except subprocess.TimeoutExpired:
                    reports.append({**rank, "error": f"no sum within {timeout:g} s"})
                    continue
                with open(log, encoding="utf-8", errors="replace") as file:
                    lines = [line.strip() for line in file if line.strip()]
                if code == 0:
                    reports.append({**rank, **json.loads(lines[-1])})
                else:
                    reports.append({**rank, "error": (lines or [f"exit code {code}"])[-1][:300]})
        finally:
            for process, _ in started:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        return reports
