"""Two real servers that are killed and restarted while they answer."""

import contextlib
import json
import os
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest
from stand_ins import VOCABULARY, sampled

from dynamo_megatron.config import Config
from dynamo_megatron.rollout.result import RolloutError, SyncNeeded
from dynamo_megatron.rollout.store import read_rollouts, step_file
from dynamo_megatron.rollout.worker import RolloutWorker
from dynamo_megatron.runtime.guard import shared_memory_of
from dynamo_megatron.types import Prompt

END = 3  # <|im_end|>
PROMPTS = [Prompt(f"p{i}", text="?", tokens=[20 + i, 30, 40]) for i in range(4)]
REWARDS = "def length(prompt, response):\n    return float(len(response))\n"


def configuration(model: Path, folder: Path, **rollout) -> Config:
    """The folder must hold `fleet_rewards.py` with REWARDS and be the current one."""
    return Config(
        model={"path": str(model), "dtype": "float32"},
        data={"source": "unused"},
        output_dir=str(folder),
        rollout={"max_new_tokens": 60, "start_timeout": 400, **rollout},
        reward={"functions": ["fleet_rewards:length"], "workers": 1},
    )


def command_line_of(process: psutil.Process) -> list[str]:
    """Empty where it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is one, too
        return process.cmdline()
    return []


def processes_of(name: str) -> list[psutil.Process]:
    """The SGLang processes, the HTTP server first, of the server `name` that some descendant of this process runs."""
    for process in psutil.Process().children(recursive=True):
        words = command_line_of(process)
        if "dynamo_megatron.runtime.guard" in words and any(word.startswith(f"{name}-") for word in words):
            return process.children(recursive=True)
    return []


def kill(name: str) -> None:
    found = processes_of(name)
    assert found, f"{name} has no processes"
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):  # once the first is gone, the guard ends the others
            process.kill()


def push(worker: RolloutWorker, version: int) -> list[str]:
    """Gives all healthy servers' weights another version; returns the servers' names."""
    endpoints = worker.begin_sync(version)
    for endpoint in endpoints:
        body = json.dumps({"new_version": str(version), "abort_all_requests": False}).encode()
        headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{endpoint.url}/update_weight_version", body, headers)
        urllib.request.urlopen(request, timeout=60).close()
    worker.end_sync(version, dict.fromkeys(endpoints))
    return [e.name for e in endpoints]


def wait_until(condition, timeout: float, what: str) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout} s for {what}"
        time.sleep(1.0)


def write_rewards(folder: Path) -> None:
    (folder / "fleet_rewards.py").write_text(REWARDS)
    os.chdir(folder)


@pytest.fixture(scope="module")
def fleet(tiny_model, tmp_path_factory):
    """(worker of two servers, output folder). Its interpreter refuses to start while the file `broken` is there."""
    folder, before = tmp_path_factory.mktemp("fleet"), os.getcwd()
    write_rewards(folder)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\ntest ! -e {folder}/broken || exit 9\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    config = configuration(tiny_model, folder, servers=2, python=str(python), max_new_tokens=300, timeout=120.0)
    worker = RolloutWorker(config, [END], VOCABULARY)
    worker.start()
    try:
        worker.wait_ready()
        yield worker, folder
    finally:
        worker.close()
        os.chdir(before)


def once(action):
    """An `on_count` that acts when the first responses are there."""
    done = []

    def on_count(finished: int, tokens: int) -> None:
        if finished >= 2 and not done:
            done.append(action())

    return on_count


@pytest.mark.full
def test_a_server_killed_while_it_generates_loses_no_rollout(fleet):
    worker, folder = fleet
    pids = [p.pid for p in processes_of("server-1")]
    segments = shared_memory_of(pids)
    result = sampled(worker, 1, PROMPTS, [16] * 4, on_count=once(lambda: kill("server-1")))
    result.check_accounts(64)
    assert result.counts["failed"] == result.counts["aborted"] == 0, result.notes
    assert len(read_rollouts(step_file(folder, 1))) == 64
    assert result.uses["server-1"].retries > 0
    assert result.counts_by_server["server-0"]["completed"] > 0
    assert any(note.startswith("step 1: server-1 left the rotation: ") for note in result.notes), result.notes
    # Restarted, it serves the folder's weights, which are the policy's until the first push.
    wait_until(lambda: len(processes_of("server-1")) >= 3, 200, "server-1's restart")
    assert not set(pids) & {p.pid for p in processes_of("server-1")}
    assert segments and not any(os.path.exists(segment) for segment in segments)
    wait_until(lambda: set(push(worker, 0)) == {"server-0", "server-1"}, 300, "both servers")
    result = sampled(worker, 2, PROMPTS, [4] * 4)
    assert result.counts["failed"] == 0 and set(result.counts_by_server) == {"server-0", "server-1"}
    assert result.uses["server-1"].restarts == 1


@pytest.mark.full
def test_servers_that_never_come_up_again_end_the_run_with_one_message(fleet):
    """Runs last: the fleet is dead afterwards."""
    worker, folder = fleet
    push(worker, 6)
    (folder / "broken").touch()
    lose_both = once(lambda: [kill(name) for name in ("server-0", "server-1")])
    with pytest.raises(SyncNeeded):
        sampled(worker, 13, PROMPTS, [16] * 4, on_count=lose_both)
    with pytest.raises(RolloutError, match=r"no rollout server is up; server-0: .*exit code 9.*server-1") as error:
        worker.begin_sync(6)
    assert "\n" not in str(error.value)
