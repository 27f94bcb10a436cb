"""A real SLURM with two virtual nodes, and a small run from recorded rollouts to launch on it."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from background_run import json_lines, made_rollout, same_weights, small_run, step_lines, timeless

from dynamo_megatron.cli.options import parser
from dynamo_megatron.data.templates import load_tokenizer
from dynamo_megatron.launcher.options import completed
from dynamo_megatron.rollout.store import RolloutStore
from dynamo_megatron.runtime.listening import free_port

SCRIPT = Path(__file__).with_name("slurm_cluster.sh")
PROGRAMS = ("slurmctld", "slurmd", "munged")
STEPS = 8


class Cluster:
    """`environment` is what a user's shell on it has."""

    def __init__(self, folder: Path):
        self.folder = folder
        command = [SCRIPT, "start", folder, str(free_port(8))]
        # Its output goes to a file: the daemons would hold a pipe for ever.
        with open(folder / "start", "w") as log:
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=300).returncode
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
        if code:
            self.stop()
            raise AssertionError((folder / "start").read_text())

    def stop(self) -> None:
        subprocess.run([SCRIPT, "stop", self.folder], check=True, stdout=subprocess.DEVNULL, timeout=60)

    def tool(self, *words: object) -> str:
        """The output of one of SLURM's commands."""
        done = subprocess.run(
            [*map(str, words)], env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def launch(self, folder: Path, *words: object, environment: dict[str, str]) -> str:
        """`dynamo-megatron launch slurm WORDS` in the folder; the job's id."""
        done = subprocess.run(
            [sys.executable, "-P", "-m", "dynamo_megatron.cli", "launch", "slurm", *map(str, words)],
            cwd=folder,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.split("Submitted batch job ")[1].split()[0]

    def field(self, job: str, name: str) -> str:
        fields = self.tool("scontrol", "show", "job", "-o", job).split()
        return next(f for f in fields if f.startswith(f"{name}=")).partition("=")[2]

    def wait(self, job: str, output: Path, state: str = "COMPLETED", timeout: float = 300) -> None:
        """Until the job has ended, in `state`."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
        self.wait_until(lambda: self.field(job, "JobState") in over, f"the end of job {job}", output, timeout)
        assert self.field(job, "JobState") == state, logs(output)

    def wait_until(self, condition: Callable[[], object], what: str, output: Path, timeout: float = 300) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {timeout} s for {what}:\n{self.tool('squeue', '--long')}\n{logs(output)}")
            time.sleep(0.1)


def logs(output: Path) -> str:
    """The ends of all that a run's jobs have written."""
    return "\n".join(
        f"== {file}\n{file.read_text()[-3000:]}" for file in sorted(output.rglob("logs/**/*")) if file.is_file()
    )


@pytest.fixture(scope="session")
def job():
    """job(nodes=2, ...) -> the completed options of `launch slurm --nodes=2 ...`."""

    def made(*words: str, **options: object) -> argparse.Namespace:
        words = (*words, *(f"--{name.replace('_', '-')}={value}" for name, value in options.items()))
        return completed(parser().parse_args(["launch", "slurm", "c.yaml", *words]))

    return made


@pytest.fixture(scope="session")
def cluster():
    """Two nodes."""
    path = os.environ["PATH"] + ":/usr/sbin"
    for program in PROGRAMS:
        if not shutil.which(program, path=path):
            pytest.skip(f"needs {program}")
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # short: sockets lie in it
    try:
        cluster = Cluster(folder)
        yield cluster
        cluster.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def run_folder(tiny_model, tmp_path_factory) -> Path:
    """config.yaml of a run of STEPS steps on two ranks from rollouts that are made up, as many of every problem in
    every step as the allocator may ask for."""
    folder = tmp_path_factory.mktemp("launched run")  # a blank in the path
    recording = folder / "recording"
    rollout = {"engine": "recorded", "recorded": str(recording), "proof": {"max_mean_gap": None}}
    small_run(folder, tiny_model, STEPS, "aei57o", **rollout)  # a whole number of batches: no problem twice in one
    generator, tokenizer, store = np.random.default_rng(0), load_tokenizer(tiny_model), RolloutStore(recording)
    problems = json_lines(folder / "problems.jsonl")
    for step in range(1, STEPS + 1):
        for place, problem in enumerate(problems):
            prompt = tokenizer.encode(problem["problem"] + "\n")
            for index in range(15):
                response = generator.integers(5, 90, generator.integers(4, 17)).tolist()
                right = bool(generator.random() < 0.2 + 0.15 * place)
                others = {"right": right, "engine_logprobs": [-4.0] * len(response)}
                store.append(made_rollout(step, place, index, problem["id"], prompt, response, **others))
    store.close()
    return folder


@pytest.fixture(scope="session")
def undisturbed(run_folder, command_line):
    """The output folder of the run on local ranks, from its first to its last step."""
    output = run_folder / "undisturbed"
    code, text = command_line(run_folder, "train", "config.yaml", f"output_dir={output}")
    assert code == 0, text[-3000:]
    return output


@pytest.fixture(scope="session")
def ends_as_undisturbed(undisturbed):
    """Asserts that a finished run has the undisturbed one's weights, bit for bit, and its metrics but for times."""

    def compare(output: Path) -> None:
        assert same_weights(output / "hf", undisturbed / "hf")
        assert [*map(timeless, step_lines(output))] == [*map(timeless, step_lines(undisturbed))]

    return compare
