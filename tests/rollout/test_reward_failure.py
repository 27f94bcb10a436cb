"""What the user gets to read of a reward function that is late or fails: through the rollout process, and its log."""

import asyncio

import pytest
from stand_ins import VOCABULARY, Server, external, listening

from dynamo_megatron.reward import RewardError
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.rollout.worker import RolloutWorker
from dynamo_megatron.types import Prompt

REWARDS = """
import time
def score(prompt, response):
    print("\\x1b[2Jprinted")
    if prompt.prompt_id.startswith("slow"):
        time.sleep(60)
    return {"a": 1.0}[prompt.answer]
"""


@pytest.mark.full
def test_late_prompts_are_named_and_a_failure_ends_the_log_with_the_users_frames(tiny_model, tmp_path, monkeypatch):
    (tmp_path / "failing_reward.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    prompt = Prompt("p7", text="?", answer="b", tokens=[20, 30], where="problems.jsonl:4")
    slow = [Prompt(f"slow{i}", text="?", answer="a", tokens=[20, 30], where=f"problems.jsonl:{i}") for i in range(4)]

    async def fail():
        async with listening(Server()) as url:
            config = external([url], output=tmp_path)
            reward = config.reward.model_copy(update={"functions": ["failing_reward:score"], "deadline": 0.5})
            model = config.model.model_copy(update={"path": str(tiny_model)})
            worker = RolloutWorker(config.model_copy(update={"reward": reward, "model": model}), [], VOCABULARY)
            worker.start()
            try:
                await asyncio.to_thread(worker.wait_ready)
                endpoints = await asyncio.to_thread(worker.begin_push, 0)
                await asyncio.to_thread(worker.end_push, 0, dict.fromkeys(endpoints))
                late = await asyncio.to_thread(worker.generate, 1, slow, [2, 1, 1, 1])
                with pytest.raises(RolloutError):
                    await asyncio.to_thread(worker._call, "raised \x1b[2J", (), None)
                with pytest.raises(RewardError) as error:
                    await asyncio.to_thread(worker.generate, 2, [prompt], [1])
            finally:
                await asyncio.to_thread(worker.close)
            return late.notes, str(error.value), worker.log.read_text()

    notes, said, log = asyncio.run(fail())
    assert "\x1b" not in log and "\\x1b[2Jprinted" in log and "raised \\x1b[2J" in log
    named = ", ".join(f"'slow{i}' (problems.jsonl:{i})" for i in range(3))
    assert notes == [
        f"step 1: 5 of 5 rollouts have reward 0 for a reward_timeout, of prompts {named} and 1 more; the "
        "last: failing_reward:score: no value within reward.deadline (0.5 s)"
    ]
    assert said.splitlines()[0] == f'  File "{tmp_path / "failing_reward.py"}", line 7, in score'
    assert said.splitlines()[-1].startswith(
        "reward function failing_reward:score failed on prompt 'p7' (problems.jsonl:4): KeyError: 'b' ("
    )
    assert log.endswith(f"{said}\n") and "generator.py" not in log.rpartition("raised")[2], log


@pytest.mark.full
def test_steps_of_failed_rewards_alone_end_the_run_with_what_failed(tiny_model, tmp_path, monkeypatch):
    """Reward 0 for every rollout trains nothing; an evaluation of nothing else would be a false one."""
    (tmp_path / "gone_reward.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    right = Prompt("p1", text="?", answer="a", tokens=[20, 30])
    wrong = Prompt("p7", text="?", answer="b", tokens=[20, 30])

    async def work():
        async with listening(Server()) as url:
            config = external([url], output=tmp_path)
            reward = config.reward.model_copy(update={"functions": ["gone_reward:score"], "on_error": "zero"})
            model = config.model.model_copy(update={"path": str(tiny_model)})
            worker = RolloutWorker(config.model_copy(update={"reward": reward, "model": model}), [], VOCABULARY)
            worker.start()
            try:
                await asyncio.to_thread(worker.wait_ready)
                endpoints = await asyncio.to_thread(worker.begin_push, 0)
                await asyncio.to_thread(worker.end_push, 0, dict.fromkeys(endpoints))
                steps = ([wrong], [wrong], [wrong, right], [wrong], [wrong])
                for step, prompts in enumerate(steps, 1):
                    result = await asyncio.to_thread(worker.generate, step, prompts, [2] * len(prompts))
                    assert result.counts["reward_errors"] == 2
                with pytest.raises(RewardError) as last_step:
                    await asyncio.to_thread(worker.generate, 6, [wrong], [2])
                with pytest.raises(RewardError) as evaluation:
                    await asyncio.to_thread(worker.evaluate, [wrong])
                assert (await asyncio.to_thread(worker.evaluate, [right]))[0].rewards == [1.0]
            finally:
                await asyncio.to_thread(worker.close)
            return str(last_step.value), str(evaluation.value)

    failure = f"gone_reward:score: KeyError: 'b' ({tmp_path / 'gone_reward.py'}, line 7)"
    said = "could be scored; the last failure:"
    assert asyncio.run(work()) == (
        f"step 6: not one rollout of 3 steps in a row {said} {failure}",
        f"evaluation: not one of 1 responses {said} {failure}",
    )
