"""What goes with rollout.agent."""

import pytest

from dynamo_megatron.config import Config


def made(rollout: dict, template: str = "chat") -> Config:
    data = {"source": "d", "template": template}
    return Config.model_validate({"model": {"path": "m"}, "data": data, "output_dir": "o", "rollout": rollout})


def test_an_agent_needs_a_chat():
    assert made({"agent": "my_agents:agent", "agent_python": "/opt/python"}).rollout.agent_turns == 32
    with pytest.raises(ValueError, match=r"set data\.template to chat"):
        made({"agent": "my_agents:agent"}, template="{prompt}")


def test_an_interpreter_is_that_of_an_agent():
    with pytest.raises(ValueError, match=r"rollout.agent_python: is the interpreter of rollout.agent"):
        made({"agent_python": "/opt/python"})
