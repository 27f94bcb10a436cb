"""Agents of a published library, pydantic-ai, in its own interpreter: they need nothing but a session's `base_url`."""

import asyncio
import time

import pytest
from agents_scripted import CALL, Scripted, endpoint

from dynamo_megatron.rollout.agents.pool import AgentPool

AGENTS = """
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

helper = Agent(instructions="Use the tool.")

@helper.tool_plain
def add(a: int, b: int) -> int:
    "Adds two numbers."
    return a + b

def policy(session):
    return OpenAIChatModel("policy", provider=OpenAIProvider(base_url=session.base_url, api_key="any"))

async def whole(prompt, session):
    first = await helper.run(prompt.text, model=policy(session))
    second = await helper.run("Sure?", model=policy(session), message_history=first.all_messages())
    return float((first.output, second.output) == ("it is 7", "yes"))

async def streamed(prompt, session):
    async with helper.run_stream(prompt.text, model=policy(session)) as first:
        parts = [part async for part in first.stream_text(delta=True)]
    messages = first.all_messages()
    async with helper.run_stream("Sure?", model=policy(session), message_history=messages) as second:
        return float(("".join(parts), await second.get_output()) == ("it is 7", "yes"))
"""


@pytest.mark.parametrize("name", ["whole", "streamed"])
def test_a_tool_loop_is_one_segment(pydantic_ai_python, tmp_path, monkeypatch, name):
    (tmp_path / "library_agents.py").write_text(AGENTS)
    monkeypatch.chdir(tmp_path)
    scripted = Scripted(CALL, "it is 7", "yes")

    async def go() -> float:
        pool = AgentPool(f"library_agents:{name}", pydantic_ai_python, 1)
        given = {"prompt_id": "p", "messages": [], "text": "how much is 3 + 4?"}
        try:
            async with endpoint(scripted) as url:
                await pool.start()
                return await pool.run("e0", given, url, time.monotonic() + 60)
        finally:
            await pool.close()

    assert asyncio.run(go()) == 1.0
    assert scripted.session.counts == {"turns": 3, "segments": 1}
    roles = [message["role"] for message in scripted.session.episode.turns[-1].messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]
    (tool,) = scripted.session.episode.turns[0].place.tools
    assert tool["function"]["name"] == "add" and tool["function"]["description"] == "Adds two numbers."
