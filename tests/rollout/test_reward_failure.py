"""What is left of a reward function's failure in the rollout process's log: what the user can use."""

import asyncio

import pytest
from stand_ins import Server, external, listening

from dynamo_megatron.records import Prompt
from dynamo_megatron.reward import RewardError
from dynamo_megatron.rollout.worker import RolloutWorker

REWARDS = """
def score(prompt, response):
    return {"a": 1.0}[prompt.answer]
"""


def test_the_log_has_the_users_frames_and_ends_with_the_message(tiny_model, tmp_path, monkeypatch):
    (tmp_path / "failing_reward.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    prompt = Prompt("p7", text="?", answer="b", tokens=[20, 30], where="problems.jsonl:4")

    async def fail():
        async with listening(Server()) as url:
            config = external([url], output=tmp_path)
            reward = config.reward.model_copy(update={"functions": ["failing_reward:score"], "workers": 1})
            model = config.model.model_copy(update={"path": str(tiny_model)})
            worker = RolloutWorker(config.model_copy(update={"reward": reward, "model": model}), [])
            worker.start()
            try:
                await asyncio.to_thread(worker.wait_ready)
                endpoints = await asyncio.to_thread(worker.begin_push, 0)
                await asyncio.to_thread(worker.end_push, 0, dict.fromkeys(endpoints))
                with pytest.raises(RewardError) as error:
                    await asyncio.to_thread(worker.generate, 1, [prompt], [1])
            finally:
                await asyncio.to_thread(worker.close)
            return str(error.value), worker.log.read_text()

    said, log = asyncio.run(fail())
    assert said.splitlines()[0] == f'  File "{tmp_path / "failing_reward.py"}", line 3, in score'
    assert said.splitlines()[-1].startswith(
        "reward function failing_reward:score failed on prompt 'p7' (problems.jsonl:4): KeyError: 'b' ("
    )
    assert log.endswith(f"{said}\n") and "generator.py" not in log, log
