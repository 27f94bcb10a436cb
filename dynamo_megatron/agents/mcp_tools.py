"""Tools of a server that speaks MCP over stdio, for agents (docs/agents.md). It imports the standard library and `mcp`
(version 2)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from mcp import Client, MCPError, StdioServerParameters


class Tools:
    """`offered`: the tools in OpenAI's format."""

    def __init__(self, client: Client, offered: list[dict[str, Any]]):
        self._client, self.offered = client, offered

    async def call(self, call: dict[str, Any]) -> dict[str, Any]:
        """Carries out a tool call of an answer; returns the message with its result. An error is a result, too: the
        policy chose the tool and its arguments."""
        function = call["function"]
        try:
            arguments = json.loads(function["arguments"])
            result = await self._client.call_tool(function["name"], arguments)
        except (ValueError, MCPError) as error:
            text = f"error: {error}"
        else:
            parts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
            text = ("error: " if result.is_error else "") + "\n".join(parts)
        return {"role": "tool", "tool_call_id": call["id"], "content": text}


@contextlib.asynccontextmanager
async def mcp_tools(command: Sequence[str], seconds: float = 60.0, env: dict[str, str] | None = None) -> AsyncIterator:
    """Starts the server `command`, which ends with the context. `seconds`: the longest wait for one reply. `env`:
    variables that it gets besides those that `mcp` passes on."""
    started = StdioServerParameters(command=command[0], args=list(command[1:]), env=env)
    async with Client(started, read_timeout_seconds=seconds) as client:
        offered, page = [], await client.list_tools()
        while True:
            for tool in page.tools:
                function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
                offered.append({"type": "function", "function": function})
            if not page.next_cursor:
                break
            page = await client.list_tools(cursor=page.next_cursor)
        yield Tools(client, offered)
