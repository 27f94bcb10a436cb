"""The check of the rewards, where a part of them cannot be tried before the run."""

from types import SimpleNamespace

from dynamo_megatron.config import RewardConfig
from dynamo_megatron.preflight import data_checks
from dynamo_megatron.preflight.findings import skipped
from dynamo_megatron.types import Prompt


def findings(*functions):
    prime = {"model": "m"} if "prime" in functions else {}
    reward = RewardConfig(functions=list(functions), workers=1, reward_model={"path": "rm"}, servers={}, prime=prime)
    prompts = [Prompt("p", text="?", answer="4")]
    return list(data_checks.reward(SimpleNamespace(config=SimpleNamespace(reward=reward), prompts=prompts)))


def test_a_reward_model_whose_servers_start_with_the_run_is_left_out():
    left_out = skipped("reward_model: its servers start with the run")
    assert findings("reward_model") == findings("reward_model", "prime") == [left_out]
    first, second = findings("qa_exact", "reward_model")
    assert first == left_out and second.text.startswith("qa_exact on the answer and on 'I do not know.': 1 and 0")
