import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request

import numpy as np
import psutil
import pytest
from stand_ins import VOCABULARY

from dynamo_megatron.config import Config
from dynamo_megatron.reward import RewardError
from dynamo_megatron.rollout.line_files import compressed, read_raw_lines
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.rollout.store import read_rollouts, step_file
from dynamo_megatron.rollout.worker import RolloutWorker
from dynamo_megatron.types import Prompt

pytestmark = pytest.mark.full  # it starts servers of its own; tests/e2e runs the same process in `make test`
END = 3
REWARDS = """
import time

def length(prompt, response):
    if prompt.prompt_id == "broken":
        raise KeyError("no such answer")
    if prompt.prompt_id == "slow":
        time.sleep(60)
    return float(len(response))
"""
PROMPTS = [Prompt(f"p{i}", text="?", tokens=[20 + i, 30, 40]) for i in range(4)]


def configuration(model, folder, **rollout) -> Config:
    return Config(
        model={"path": str(model), "dtype": "float32"},
        data={"source": "unused"},
        output_dir=str(folder),
        rollout={"max_new_tokens": 60, "start_timeout": 400, **rollout},
        reward={"functions": ["rewards_of_test_worker:length"], "deadline": 2.0, "workers": 1},
    )


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def servers(pid: int) -> list[psutil.Process]:
    """The HTTP server, its children and the guard."""
    guards = [p for p in descendants(pid) if "dynamo_megatron.runtime.guard" in p.cmdline()]
    return [process for guard in guards for process in (guard, *guard.children(recursive=True))]


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end between two looks at it
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def wait_until(condition, timeout: float, what: str) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout} s for {what}"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def rewards(tmp_path_factory):
    """A folder with the user's reward function, where the workers find it: the current one."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "rewards_of_test_worker.py").write_text(REWARDS)
    before = os.getcwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def worker(tiny_model, rewards, output):
    config = configuration(tiny_model, output, server_args=["--log-level-http", "info"], timeout=8.0)
    worker = RolloutWorker(config, [END], VOCABULARY)
    worker.start()
    try:
        worker.wait_ready()
        yield worker
    finally:
        worker.close()


def push(worker: RolloutWorker, version: int) -> None:
    """Gives the servers' weights another version."""
    endpoints = worker.begin_push(version)
    for endpoint in endpoints:
        body = json.dumps({"new_version": str(version), "abort_all_requests": False}).encode()
        headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{endpoint.url}/update_weight_version", body, headers)
        urllib.request.urlopen(request, timeout=60).close()
    worker.end_push(version, dict.fromkeys(endpoints))


def requests_at_the_server(output) -> int:
    return (output / "logs" / "sglang-server-0.log").read_text().count("POST /generate ")


def test_groups_of_any_size_in_order(worker, output):
    polls = []
    result = worker.generate(1, PROMPTS, np.array([2, 5, 1, 3]), on_poll=lambda: polls.append(time.monotonic()))
    batch = result.batch
    assert batch.group_ids == ["000001-0000"] * 2 + ["000001-0001"] * 5 + ["000001-0002"] + ["000001-0003"] * 3
    assert batch.rollout_ids[:3] == ["000001-0000-000", "000001-0000-001", "000001-0001-000"]
    assert batch.prompt_ids == ["p0"] * 2 + ["p1"] * 5 + ["p2"] + ["p3"] * 3
    assert [batch.tokens[start] for start in batch.offsets[:-1]] == [20] * 2 + [21] * 5 + [22] + [23] * 3
    assert result.counts["requested"] == 11 == result.counts["completed"] + result.counts["truncated"]
    assert result.counts["reused"] == result.counts["failed"] == result.counts["aborted"] == 0
    assert (batch.weight_versions == 0).all()
    assert polls and max(np.diff(polls), default=0) < 2
    # A response's characters are its tokens, less the special ones.
    responses = [
        batch.tokens[batch.offsets[s] + batch.prompt_lengths[s] : batch.offsets[s + 1]]
        for s in range(len(batch.rewards))
    ]
    assert batch.rewards.tolist() == [sum(5 <= t < 101 for t in r) for r in responses]
    stored = {r.rollout_id: r for r in read_rollouts(step_file(output, 1))}
    assert [stored[name].reward for name in batch.rollout_ids] == batch.rewards.tolist()


def test_a_resumed_step_generates_only_what_is_missing(worker, output):
    counts = [5, 5, 5, 5]
    first = worker.generate(2, PROMPTS, counts)
    path = step_file(output, 2)
    frames = [compressed(line) for line in read_raw_lines(path)]
    path.write_bytes(b"".join(frames[:18]) + frames[18][:50])  # killed at 90 %, within a line
    kept = {r.rollout_id: r for r in read_rollouts(step_file(output, 2))}
    before = requests_at_the_server(output)
    again = worker.generate(2, PROMPTS, counts)
    assert 1 <= requests_at_the_server(output) - before <= 2  # two rollouts, which may share a request
    assert again.counts["reused"] == 18 and again.counts["requested"] == 20
    assert again.batch.rollout_ids == first.batch.rollout_ids
    stored = {r.rollout_id: r for r in read_rollouts(step_file(output, 2))}
    assert len(stored) == 20 and all(stored[name] == rollout for name, rollout in kept.items())


def test_a_later_part_of_a_step_resumes_apart_from_the_first(worker, output):
    """As dynamic sampling asks: positions 0 and 1, then 2 and 3; killed in the second part."""
    worker.generate(18, PROMPTS[:2], [3, 3])
    later = worker.generate(18, PROMPTS[2:], [4, 4], first=2)
    assert later.batch.group_ids == ["000018-0002"] * 4 + ["000018-0003"] * 4
    path = step_file(output, 18)
    path.write_bytes(b"".join(map(compressed, list(read_raw_lines(path))[:-3])))
    before = requests_at_the_server(output)
    assert worker.generate(18, PROMPTS[:2], [3, 3]).counts["reused"] == 6
    again = worker.generate(18, PROMPTS[2:], [4, 4], first=2)
    assert 1 <= requests_at_the_server(output) - before <= 3 and again.counts["reused"] == 5
    assert again.batch.rollout_ids == later.batch.rollout_ids
    assert len(read_rollouts(step_file(output, 18))) == 14


def test_rollouts_of_other_prompts_or_weights_are_discarded_with_a_note(worker, output):
    worker.generate(3, PROMPTS[:2], [3, 3])
    result = worker.generate(3, [PROMPTS[0], PROMPTS[2]], [3, 2])
    assert result.counts["reused"] == 3
    assert result.notes == [
        "step 3: 3 rollouts of an interrupted run are reused, with their rewards",
        "step 3: discarded rollouts of an interrupted run: 3 of another prompt",
    ]
    assert len(read_rollouts(step_file(output, 3))) == 5
    push(worker, 4)
    result = worker.generate(3, [PROMPTS[0], PROMPTS[2]], [3, 2])
    assert result.counts["reused"] == 0 and (result.batch.weight_versions == 4).all()
    assert result.notes == ["step 3: discarded rollouts of an interrupted run: 5 of another weight version"]
    push(worker, 0)


def test_a_slow_verifier_is_counted_and_its_rollout_trained_on(worker):
    result = worker.generate(4, [PROMPTS[0], Prompt("slow", text="?", tokens=[20], where="slow.jsonl:7")], [2, 1])
    assert result.counts["reward_timeouts"] == 1
    (note,) = result.notes
    said = "step 4: 1 of 3 rollouts have reward 0 for a reward_timeout, of prompt 'slow' (slow.jsonl:7); the last: "
    assert note.startswith(said) and ": no value within reward.deadline (" in note
    assert len(result.batch.rewards) == 3 and result.batch.rewards[2] == 0


def test_a_failing_reward_function_keeps_its_message_and_the_worker_lives(worker):
    with pytest.raises(RewardError, match=r"length failed on prompt 'broken': KeyError.*no such answer") as error:
        worker.generate(5, [PROMPTS[0], Prompt("broken", text="?", tokens=[20])], [2, 1])
    assert str(error.value).startswith('  File "') and str(error.value).count('  File "') == 1
    assert worker.generate(6, PROMPTS[:1], [1]).counts["requested"] == 1


def test_signals_that_ask_the_ranks_to_stop_end_nothing_here(worker):
    """SLURM sends them to every process of a job: to save, the ranks need their servers."""
    family = [worker._process, *descendants(worker._process.pid)]
    for number in (signal.SIGUSR1, signal.SIGTERM):
        for process in family:
            os.kill(process.pid, number)
    time.sleep(2)
    assert len(alive(family[1:])) == len(family) - 1
    result = worker.generate(70, PROMPTS[:2], [2, 2])
    assert sum(use.retries for use in result.uses.values()) == 0 and len(result.batch.rollout_ids) == 4


def test_a_refused_request_does_not_lose_the_others(worker):
    long = Prompt("long", text="?", tokens=[20] * 3000)
    result = worker.generate(7, [long, PROMPTS[1]], [1, 2])
    assert result.counts["failed"] == 1 and result.batch.prompt_ids == ["p1", "p1"]
    assert result.counts["requested"] == 3
    said = "step 7: 1 of 3 rollouts failed; the first: 000007-0000-000: the server refused it"
    assert any(note.startswith(said) for note in result.notes), result.notes
    nothing = worker.generate(8, [long], [2])
    assert not nothing.batch.rollout_ids and "step 8: 2 of 2 rollouts failed" in nothing.notes[0]


def test_malformed_requests_are_refused_at_once(worker):
    with pytest.raises(ValueError, match="counts: 1 for 2 prompts"):
        worker.generate(9, PROMPTS[:2], [1])
    with pytest.raises(ValueError, match="prompt 'bare' has no tokens"):
        worker.generate(9, [Prompt("bare", text="?")], [1])


def test_a_child_killed_while_it_generates_is_named_and_leaves_nothing(worker):
    """Runs last on the shared worker."""
    pid = worker._process.pid
    processes = descendants(pid)
    assert len(processes) >= 5  # the guard, HTTP server, scheduler, detokenizer, a reward worker
    with pytest.raises(RolloutError, match=rf"the rollout process \(pid {pid}\) ended \(signal 9\); see .*rollout.log"):
        worker.generate(10, PROMPTS, [8] * 4, on_poll=lambda: os.kill(pid, signal.SIGKILL))
    with pytest.raises(RolloutError, match="ended"):
        worker.generate(10, PROMPTS, [1] * 4)
    wait_until(lambda: not alive(processes), 10, "the server's and reward workers' end")
    worker.close()


def test_nothing_outlives_a_parent_killed_while_the_server_starts(tiny_model, rewards, tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import sys\n"
        "from dynamo_megatron.config import Config\n"
        "from dynamo_megatron.rollout.worker import RolloutWorker\n"
        "if __name__ == '__main__':\n"
        "    worker = RolloutWorker(Config.model_validate_json(sys.argv[1]), [3], 128)\n"
        "    worker.start()\n"
        "    worker.wait_ready()\n"
    )
    config = configuration(tiny_model, tmp_path).model_dump_json()
    with (tmp_path / "parent.log").open("wb") as log:
        parent = subprocess.Popen([sys.executable, "-P", str(script), config], stdout=log, stderr=log)
        try:
            # The child, the guard, the HTTP server, and what that has begun to start.
            wait_until(lambda: len(servers(parent.pid)) >= 3, 120, "the server's processes")
            processes = descendants(parent.pid)
        finally:
            parent.kill()
            parent.wait(10)
    wait_until(lambda: not alive(processes), 30, "the end of all that the parent started")


def test_an_unloadable_reward_function_is_refused_at_the_start(tiny_model, tmp_path):
    config = configuration(tiny_model, tmp_path)
    config = config.model_copy(update={"reward": config.reward.model_copy(update={"functions": ["nowhere:f"]})})
    worker = RolloutWorker(config, [END], VOCABULARY)

    class Stop(Exception):
        pass

    def stop():
        raise Stop

    worker.start()
    try:
        with pytest.raises(Stop):
            worker.wait_ready(on_poll=stop)
        with pytest.raises(ValueError, match="nowhere") as error:
            worker.wait_ready()
        assert "\n" not in str(error.value)
        processes = descendants(os.getpid())
    finally:
        started = time.monotonic()
        worker.close()
    assert time.monotonic() - started < 15
    assert not [p for p in alive(processes) if str(tmp_path) in " ".join(p.cmdline())]
