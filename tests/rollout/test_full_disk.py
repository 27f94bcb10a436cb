"""A disk that is full in the middle of a step, a real one: the run ends with a line that says so, and loses nothing."""

import asyncio

import pytest
from stand_ins import VOCABULARY, Server, external, listening

from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.rollout.store import read_rollouts, step_file
from dynamo_megatron.rollout.worker import RolloutWorker
from dynamo_megatron.types import Prompt

REWARDS = """
import sys
def score(prompt, response):
    print("a user may print " + 5000 * "x", flush=True)
    print("and warn", file=sys.stderr)
    return 1.0
"""
PROMPTS = [Prompt(f"p{i}", text="?", answer="a", tokens=[20, 30]) for i in range(4)]


def fill(folder) -> None:
    with (folder / "ballast").open("wb", buffering=0) as file:
        for size in (1 << 16, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                pass


@pytest.mark.full
def test_the_line_that_says_so_is_not_lost_with_the_log_and_the_next_start_goes_on(
    tiny_model, tmp_path, small_disk, monkeypatch
):
    (tmp_path / "printing_reward.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)

    async def started(url):
        config = external([url], output=small_disk, timeout=30.0)
        reward = config.reward.model_copy(update={"functions": ["printing_reward:score"], "workers": 1})
        model = config.model.model_copy(update={"path": str(tiny_model)})
        worker = RolloutWorker(config.model_copy(update={"reward": reward, "model": model}), [], VOCABULARY)
        worker.start()
        await asyncio.to_thread(worker.wait_ready)
        endpoints = await asyncio.to_thread(worker.begin_push, 0)
        await asyncio.to_thread(worker.end_push, 0, dict.fromkeys(endpoints))
        return worker

    async def run():
        async with listening(Server()) as url:
            worker = await started(url)
            try:
                await asyncio.to_thread(worker.generate, 1, PROMPTS, [2, 2, 0, 0])
                fill(small_disk)
                with pytest.raises(RolloutError) as error:
                    await asyncio.to_thread(worker.generate, 1, PROMPTS, [8, 8, 8, 8])
            finally:
                await asyncio.to_thread(worker.close)
            kept = read_rollouts(step_file(small_disk, 1))
            (small_disk / "ballast").unlink()
            worker = await started(url)
            try:
                result = await asyncio.to_thread(worker.generate, 1, PROMPTS, [8, 8, 8, 8])
            finally:
                await asyncio.to_thread(worker.close)
            return str(error.value), kept, result

    said, kept, result = asyncio.run(run())
    assert "step-000001.jsonl.zst: cannot write rollouts: " in said, said
    assert "full" in said or "No space left" in said
    assert len(kept) >= 4 and result.reused == len(kept) and len(read_rollouts(step_file(small_disk, 1))) == 32
