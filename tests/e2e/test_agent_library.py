"""A run with an agent of a published library, pydantic-ai: real ranks, a real server, the library's interpreter."""

import pytest

from dynamo_megatron.rollout.store import read_rollouts, step_file

pytestmark = pytest.mark.full
AGENT = """
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

helper = Agent(instructions="Use the tool.", model_settings={"max_tokens": 12}, retries=4)  # of empty answers

@helper.tool_plain
def add(a: int, b: int) -> int:
    return a + b

async def agent(prompt, session):
    model = OpenAIChatModel("policy", provider=OpenAIProvider(base_url=session.base_url, api_key="any"))
    first = await helper.run(prompt.text, model=model)
    async with helper.run_stream("Sure?", model=model, message_history=first.all_messages()) as second:
        return float(len(await second.get_output()) % 2)
"""
STEPS = 2


def test_it_trains(workspace, command_line, pydantic_ai_python, step_lines):
    (workspace / "live_library.py").write_text(AGENT)
    output = workspace / "agent-library"
    settings = [
        "rollout.agent=live_library:agent",
        f"rollout.agent_python={pydantic_ai_python}",
        "rollout.agent_workers=1",
        "rollout.max_new_tokens=64",
        "model.max_length=512",
        "data.template=chat",
        "trainer.micro_batch_tokens=1024",
        f"trainer.steps={STEPS}",
        f"output_dir={output}",
    ]
    code, said = command_line(workspace, "train", workspace / "config.yaml", *settings)
    assert code == 0, said[-4000:]
    rollouts = [r for step in range(1, STEPS + 1) for r in read_rollouts(step_file(output, step))]
    assert len(rollouts) == 24 * STEPS and {r.status for r in rollouts} == {"ok"}
    for rollout in rollouts:
        roles = [message["role"] for message in rollout.episode.messages]
        assert roles[:2] == ["system", "user"] and "Sure?" in [m["content"] for m in rollout.episode.messages]
        assert rollout.reward == len(rollout.episode.messages[-1]["content"]) % 2
        # The library does not send an empty answer again, so that what follows is a segment of its own.
        dropped = sum(turn.message is None for turn in rollout.episode.turns)
        assert len(rollout.episode.starts) == 1 + dropped
    assert any(len(rollout.episode.starts) == 1 for rollout in rollouts)
    rows = step_lines(output)
    assert all(row["agent/turns"] >= 2 and row["rollout/logprob_gap_max"] <= 1e-4 for row in rows)
    assert any(row["policy/grad_norm"] > 0 for row in rows)
