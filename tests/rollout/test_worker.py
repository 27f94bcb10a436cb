"""The rollout process: what rank 0 gets from it, also where it fails or dies."""

import asyncio
import contextlib
import os
import resource
import signal
import threading

import psutil
import pytest
from stand_ins import VOCABULARY, Server, external, listening, sampled

from dynamo_megatron.data.templates import decoder_of, load_tokenizer
from dynamo_megatron.errors import ConfigError
from dynamo_megatron.reward import RewardError
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.rollout.store import read_rollouts, step_file
from dynamo_megatron.rollout.worker import RolloutWorker
from dynamo_megatron.runtime.line_files import compressed
from dynamo_megatron.types import Prompt

REWARDS = """
def length(prompt, response):
    print("\\x1b[2Jprinted")
    if prompt.prompt_id == "broken":
        raise KeyError("no such answer")
    return float(len(response))
"""
PROMPTS = [Prompt(f"p{i}", text="?", tokens=[20 + i, 30, 40]) for i in range(4)]


@pytest.fixture(scope="module")
def worker(tiny_model, tmp_path_factory):
    """A RolloutWorker whose server is a stand-in in a thread."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "rewards_of_test_worker.py").write_text(REWARDS)
    urls, stops, listens, before = [], [], threading.Event(), os.getcwd()

    def behaviour(name, number):
        return asyncio.sleep(60.0 if name.startswith("000010") else 0.5)

    async def serve():
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        stops.append(lambda: loop.call_soon_threadsafe(done.set))
        async with listening(Server(behaviour)) as url:
            urls.append(url)
            listens.set()
            await done.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))  # also ends the requests that were cut off
    thread.start()
    listens.wait()
    os.chdir(folder)
    config = external(urls, output=tmp_path_factory.mktemp("run"))
    reward = config.reward.model_copy(update={"functions": ["rewards_of_test_worker:length"], "workers": 1})
    model = config.model.model_copy(update={"path": str(tiny_model)})
    config = config.model_copy(update={"reward": reward, "model": model})
    worker = RolloutWorker(config, [3], VOCABULARY, decoder_of(load_tokenizer(str(tiny_model))))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1000, soft), hard))
    worker.start()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        worker.wait_ready()
        worker.end_sync(0, dict.fromkeys(worker.begin_sync(0)))
        yield worker
    finally:
        worker.close()
        os.chdir(before)
        stops[0]()
        thread.join()


def test_groups_of_any_size_in_order(worker):
    polls, counted = [], []
    result = sampled(worker, 1, PROMPTS, [2, 5, 1, 3], lambda: polls.append(1), lambda *count: counted.append(count))
    batch = result.batch
    assert batch.group_ids == ["000001-0000"] * 2 + ["000001-0001"] * 5 + ["000001-0002"] + ["000001-0003"] * 3
    assert batch.rollout_ids[:3] == ["000001-0000-000", "000001-0000-001", "000001-0001-000"]
    assert batch.prompt_ids == ["p0"] * 2 + ["p1"] * 5 + ["p2"] + ["p3"] * 3
    assert [batch.tokens[start] for start in batch.offsets[:-1]] == [20] * 2 + [21] * 5 + [22] + [23] * 3
    result.check_accounts(11)
    assert polls and batch.rewards.tolist() == [3.0] * 11
    stored = read_rollouts(step_file(worker._config.output_dir, 1))
    assert sorted(r.rollout_id for r in stored) == sorted(batch.rollout_ids)
    later = sampled(worker, 1, PROMPTS[2:], [4, 4], first=4)
    assert later.batch.group_ids == ["000001-0004"] * 4 + ["000001-0005"] * 4 and later.reused == 0


def test_a_failing_reward_function_keeps_its_message_and_the_worker_lives(worker):
    broken = Prompt("broken", text="?", tokens=[20], where="problems.jsonl:4")
    said = r"length failed on prompt 'broken' \(problems.jsonl:4\): KeyError.*no such answer"
    with pytest.raises(RewardError, match=said) as error:
        sampled(worker, 5, [PROMPTS[0], broken], [2, 1])
    assert str(error.value).startswith('  File "') and str(error.value).count('  File "') == 1
    log = worker.log.read_text()
    assert "\x1b" not in log and "\\x1b[2Jprinted" in log and log.endswith(f"{error.value}\n")
    assert sampled(worker, 6, PROMPTS[:1], [1]).counts["requested"] == 1


def test_a_broken_file_of_the_step_is_bad_input_and_the_worker_lives(worker):
    path = step_file(worker._config.output_dir, 7)
    path.write_bytes(compressed(b"{}\n"))
    with pytest.raises(ConfigError, match=f"^{path}:1: "):  # with which a resume ends with exit code 2
        sampled(worker, 7, PROMPTS[:1], [1])
    path.unlink()
    assert sampled(worker, 7, PROMPTS[:1], [1]).counts["requested"] == 1


def test_a_child_killed_while_it_generates_is_named_and_leaves_nothing(worker):
    """Runs last on the shared worker."""
    pid = worker._process.pid
    assert len(set(resource.prlimit(pid, resource.RLIMIT_NOFILE))) == 1  # each request may take a connection
    processes = psutil.Process(pid).children(recursive=True)
    assert processes
    with pytest.raises(RolloutError, match=rf"the rollout process \(pid {pid}\) ended \(signal 9\); see .*rollout.log"):
        sampled(worker, 10, PROMPTS, [8] * 4, on_poll=lambda: os.kill(pid, signal.SIGKILL))
    with pytest.raises(RolloutError, match="ended"):
        sampled(worker, 10, PROMPTS, [1] * 4)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.wait(60)
