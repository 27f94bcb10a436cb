"""Tool calls by SGLang's own parser, of a real server."""

import asyncio
import json

import pytest

from dynamo_megatron.config import RolloutConfig
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
