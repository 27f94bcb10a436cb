"""Tools of an MCP server over stdio. Needs the package `mcp`, version 2."""

import asyncio
import json
import sys

import pytest

if not hasattr(pytest.importorskip("mcp"), "MCPError"):
    pytest.skip("needs version 2 of mcp", allow_module_level=True)

from dynamo_megatron.agents.mcp_tools import mcp_tools

SERVER = """
from mcp.server import MCPServer

server = MCPServer("sums")

@server.tool()
def add(a: int, b: int) -> str:
    "Adds two numbers."
    if a < 0:
        raise ValueError("a is below 0")
    return str(a + b)

server.run()
"""


def test_the_tools_of_a_server_are_offered_and_called(tmp_path):
    (tmp_path / "server.py").write_text(SERVER)

    def asked(name, arguments):
        return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}

    async def work():
        async with mcp_tools([sys.executable, str(tmp_path / "server.py")]) as tools:
            calls = [("add", '{"a": 3, "b": 4}'), ("add", '{"a": -1, "b": 4}'), ("add", "{"), ("no_such", "{}")]
            calls.append(("add", "[1]"))
            return tools.offered, [await tools.call(asked(*call)) for call in calls]

    (tool,), (right, *wrong) = asyncio.run(asyncio.wait_for(work(), 60))
    assert tool["type"] == "function" and tool["function"]["name"] == "add"
    assert tool["function"]["description"] == "Adds two numbers."
    assert set(tool["function"]["parameters"]["properties"]) == {"a", "b"} and json.dumps(tool)
    assert right == {"role": "tool", "tool_call_id": "c1", "content": "7"}
    assert all(answer["content"].startswith("error: ") for answer in wrong)
