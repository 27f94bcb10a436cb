"""Tool calls by SGLang's own parser, of a real server."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from dynamo_megatron.config import RolloutConfig
from dynamo_megatron.rollout.agents.episodes import Agents
from dynamo_megatron.rollout.agents.messages import BadRequest
from dynamo_megatron.rollout.agents.session import tool_calls
from dynamo_megatron.rollout.client import SGLangClient, open_session
from dynamo_megatron.rollout.result import RolloutError

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def test_qwens_form_is_read(sglang_server):
    text = 'so: <tool_call>\n{"name": "add", "arguments": {"b": "größer", "a": 1}}\n</tool_call>'

    async def work():
        async with open_session() as session:
            client = SGLangClient(session, sglang_server.endpoint, RolloutConfig(), [3])
            found = [await client.parse_tool_calls(t, TOOLS, "qwen25") for t in (text, "no call", "<tool_call>\n{")]
            with pytest.raises(RolloutError, match="parses no tool calls"):
                await client.parse_tool_calls(text, TOOLS, "no-such-form")
            return found

    called, plain, torn = map(tool_calls, asyncio.run(work()))
    (call,) = called[1]
    assert called[0] == "so:" and call["function"]["name"] == "add" and call["id"]
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": "größer"}
    assert plain == ("no call", []) and torn[1] == []


class Failing:
    """A server whose parser fails on texts with a call of no object, as SGLang's does with status 500; or on all."""

    def __init__(self, on_all: bool):
        self._on_all = on_all

    async def parse_tool_calls(self, text, tools, parser):
        if text or self._on_all:
            raise RolloutError("parses no tool calls: 500")
        return {"normal_text": "", "calls": []}


def test_a_text_that_the_parser_fails_on_is_an_answer_without_calls():
    def parse(*servers):
        fleet, config = SimpleNamespace(clients=lambda first: servers), SimpleNamespace(rollout=RolloutConfig())
        agents = SimpleNamespace(fleet=fleet, config=config)
        return asyncio.run(Agents.parse_tools(agents, text, TOOLS))

    text = '<tool_call>\n"add"\n</tool_call>'
    assert parse(Failing(True), Failing(False)) == (text, [])
    with pytest.raises(BadRequest, match="500"):
        parse(Failing(True))
