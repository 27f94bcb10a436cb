"""Whole runs of `dynamo-megatron train` on two ranks, as a user starts them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

KILL_STEP = 5
ANSWERS = "aei 7"


class Run:
    """A run in the background. Its output goes to a file: a child that outlives a rank would hold a pipe for ever."""

    def __init__(self, folder: Path, *arguments: str, environment: dict[str, str] | None = None):
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / f"console-{time.monotonic_ns()}.log"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "dynamo_megatron.cli", "train", *map(str, arguments)],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
                start_new_session=True,
            )
        self.family: list[psutil.Process] = []

    def look(self) -> None:
        """Notes the processes that belong to the run."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for p in psutil.Process(self.process.pid).children(recursive=True):
                if p not in self.family:
                    self.family.append(p)

    def wait(self, timeout: float = 240) -> int:
        deadline = time.monotonic() + timeout
        while self.process.poll() is None:
            self.look()
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"the run took more than {timeout} s:\n{self.text[-3000:]}")
            time.sleep(0.1)
        return self.process.returncode

    def wait_until(self, condition, what: str, timeout: float = 240) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert self.process.poll() is None, f"the run ended before {what}:\n{self.text[-3000:]}"
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"waited {timeout} s for {what}:\n{self.text[-3000:]}")
            self.look()
            time.sleep(0.005)

    def kill(self) -> None:
        """kill -9 of the launcher's whole process group."""
        self.look()
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def left_behind(self, within: float) -> list[psutil.Process]:
        """The run's processes still alive after at most `within` seconds."""
        deadline = time.monotonic() + within
        while True:
            alive = [p for p in self.family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
            if not alive or time.monotonic() > deadline:
                return alive
            time.sleep(0.1)

    @property
    def text(self) -> str:
        return self.log.read_text()


def metrics(output: Path) -> list[dict]:
    file = output / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def rollout_lines(output: Path, step: int) -> list[str]:
    file = output / "rollouts" / f"step-{step:06d}.jsonl"
    return file.read_text().splitlines() if file.is_file() else []


@pytest.fixture(scope="session")
def steps(request) -> int:
    """20 at full count, 12 in `make test`."""
    return 12 if request.config.option.markexpr == "not full" else 20


@pytest.fixture(scope="session")
def workspace(tiny_model, tmp_path_factory, steps) -> Path:
    """Model, problems, reward function and config of a small run: does the response contain the answer?"""
    folder = tmp_path_factory.mktemp("e2e")
    rows = [{"id": f"problem-{i}", "problem": f"Write {a!r}.", "answer": a} for i, a in enumerate(ANSWERS)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "own_reward.py").write_text(
        "import os, time\n"
        "def contains(prompt, response):\n"
        "    if os.path.exists('fail-now'):\n"
        "        raise KeyError('the reward table has no such entry')\n"
        "    time.sleep(0.02)\n"
        "    return float(prompt.answer in response)\n"
    )
    config = {
        "model": {"path": str(tiny_model), "dtype": "float32", "max_length": 256},
        "data": {"source": str(folder / "problems.jsonl"), "batch_prompts": 3, "template": "{prompt}\n"},
        "parallel": {"pp": 2},
        "rollout": {"max_new_tokens": 16, "start_timeout": 400},
        "reward": {"functions": ["own_reward:contains"], "workers": 1},
        "algorithm": {"allocation": {"budget": 24, "rollout_n_min": 2, "rollout_n_max": 15, "variance_floor": 0.0}},
        "optimizer": {"lr": 3e-3, "warmup_steps": 0},
        "trainer": {"steps": steps, "micro_batch_tokens": 256},
        "checkpoint": {"every": 4},
        "output_dir": "unset",
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.fixture(scope="session")
def live(request, workspace) -> tuple[Path, dict]:
    """A live run: (output folder, what was seen of its kill).

    At full count it is killed at 90 % of a step's rollouts and started again; `make test` has no time for two servers.
    """
    output, seen = workspace / "live", {}
    command = (workspace / "config.yaml", f"output_dir={output}")
    run = Run(workspace, *command)
    if request.config.option.markexpr != "not full":
        run.wait_until(lambda: len(rollout_lines(output, KILL_STEP)) >= 22, f"90 % of the rollouts of step {KILL_STEP}")
        run.kill()
        seen = {"left": run.left_behind(within=30), "finished": rollout_lines(output, KILL_STEP)[:22]}
        run = Run(workspace, *command)
    assert run.wait() == 0, run.text[-3000:]
    return output, seen


@pytest.fixture(scope="session")
def start_run():
    """Run(folder, *arguments), ended with the session if the test did not."""
    started = []

    def start(*arguments, **options) -> Run:
        started.append(Run(*arguments, **options))
        return started[-1]

    yield start
    for run in started:
        if run.process.poll() is None:
            run.kill()


@pytest.fixture(scope="session")
def step_lines():
    return metrics
