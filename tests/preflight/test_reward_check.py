"""The check of the rewards, where a part of them cannot be tried before the run, or has no place in it."""

import socket
import sys
from types import SimpleNamespace

import pytest

from dynamo_megatron.config import RewardConfig
from dynamo_megatron.preflight import data_checks
from dynamo_megatron.preflight.findings import skipped
from dynamo_megatron.types import Prompt


def findings(*functions, **settings):
    prime = {"model": "m"} if "prime" in functions else {}
    servers = {} if "reward_model" in functions else None
    model = {"path": "rm"}
    reward = RewardConfig(functions=functions, workers=1, reward_model=model, servers=servers, prime=prime, **settings)
    prompts = [Prompt("p", text="?", answer="4")]
    return list(data_checks.reward(SimpleNamespace(config=SimpleNamespace(reward=reward), prompts=prompts)))


def test_a_reward_model_whose_servers_start_with_the_run_is_left_out():
    left_out = skipped("reward_model: its servers start with the run")
    assert findings("reward_model") == findings("reward_model", "prime") == [left_out]
    first, second = findings("qa_exact", "reward_model")
    assert first == left_out and second.text.startswith("qa_exact on the answer and on 'I do not know.': 1 and 0")


def test_placement_on_a_ray_cluster_is_refused_where_there_is_none(monkeypatch):
    pytest.importorskip("ray")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{nobody.getsockname()[1]}")
        with pytest.raises(ValueError) as error:
            findings("qa_exact", placement="ray")
    line = str(error.value)
    assert line.startswith("reward.placement: ray, and there is no Ray cluster ([Errno 111] Connection refused); start")
    assert "\n" not in line and "RAY_ADDRESS" in line


def test_it_is_refused_where_ray_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "dynamo_megatron.reward.ray_workers", raising=False)
    with pytest.raises(ValueError, match=r"^reward.placement: ray: this interpreter has no ray; pip install"):
        findings("qa_exact", placement="ray")
