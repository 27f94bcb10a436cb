"""`launch slurm` on a real SLURM of two virtual nodes: time limit, preemption, a node's failure, cancelling."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import psutil
import pytest


@pytest.fixture
def launched(cluster, run_folder, tmp_path):
    """launch(*words) -> (job, output): the run on both nodes, one rank each; cancelled with the test."""
    jobs = []

    def launch(*words: object) -> tuple[str, Path]:
        output = tmp_path / "it's a run %j"
        job = cluster.launch(run_folder, "config.yaml", f"output_dir={output}", "--nodes", "2", *words)
        jobs.append(job)
        return job, output

    yield launch
    for job in jobs:
        cluster.tool("scancel", job)


def batch_log(output: Path, job: str) -> str:
    return (output / "logs" / f"slurm-{job}.out").read_text()


def rank_log(output: Path, job: str, rank: int) -> str:
    return (output / "logs" / f"slurm-{job}" / f"rank-{rank}.log").read_text()


def processes_with(text: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if any(text in word for word in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_usr1_saves_requeues_and_goes_on(cluster, launched, rows, same_weights):
    job, output = launched("--time", "30")
    cluster.wait_until(lambda: len(rows(output)) >= 3, "three steps", output)
    cluster.tool("scancel", "--batch", "--signal=USR1", job)
    cluster.wait_until(lambda: cluster.field(job, "Restarts") == "1", "the requeue", output)
    done = len(rows(output))
    assert 3 <= done < 16
    cluster.wait(job, output)
    assert "SIGUSR1: the ranks save and stop" in batch_log(output, job)
    assert "stopped by SIGUSR1; the same command goes on from here" in rank_log(output, job, 0)
    assert f"(step {done})" in rank_log(output, job, 0), "goes on from where it was stopped"
    same_weights(output)
