"""Messages and tools as OpenAI's chat completions have them, in the one form that sessions compare and render. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool")


class BadRequest(ValueError):
    """What an agent asked for cannot be answered. One line, which the agent gets."""


class LimitReached(BadRequest):
    """A limit of the episode refuses the request."""


def normalised(messages: Any) -> list[Message]:
    """The messages of a request: role, content (a text), and what there is of tool calls, tool_call_id and name.

    Arguments of tool calls become objects, as templates expect them. Other fields are left out: clients send back
    whatever they were given. Raises BadRequest.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise BadRequest("messages: give a list of at least one message")
    return [_message(message, number) for number, message in enumerate(messages)]


def _message(message: Any, number: int) -> Message:
    where = f"messages[{number}]"
    if not isinstance(message, Mapping):
        raise BadRequest(f"{where}: not an object")
    role = "system" if message.get("role") == "developer" else message.get("role")
    if role not in ROLES:
        raise BadRequest(f"{where}.role: {role!r:.40} is none of {', '.join(ROLES)}")
    found: Message = {"role": role, "content": _text(message.get("content"), where)}
    if calls := message.get("tool_calls"):
        if role != "assistant":
            raise BadRequest(f"{where}.tool_calls: a list, of an assistant's message")
        found["tool_calls"] = normalised_calls(calls, where)
    for name in ("tool_call_id", "name"):
        if message.get(name) is not None:
            found[name] = str(message[name])
    return found


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise BadRequest(f"{where}.content: neither a text nor a list of parts")
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BadRequest(f"{where}.content: a part that is no text")
    return "".join(part["text"] for part in content)


def normalised_calls(calls: Any, where: str) -> list[Message]:
    """The tool calls of a message, with arguments as objects. `where`: the message, for errors. Raises BadRequest."""
    if not isinstance(calls, Sequence):
        raise BadRequest(f"{where}.tool_calls: a list, of an assistant's message")
    return [_call(call, where) for call in calls]


def _call(call: Any, where: str) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{where}.tool_calls: a call without a function's name")
    arguments = arguments_of(function)
    return {
        "id": str(call.get("id", "")),
        "type": "function",
        "function": {"name": function["name"], "arguments": {} if arguments is None else arguments},
    }


def arguments_of(function: Mapping[str, Any]) -> Any:
    """Of a call: the object where they are one, or its JSON; else what is there."""
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return arguments
    try:
        read = json.loads(arguments)
    except ValueError:
        return arguments
    return read if isinstance(read, dict) else arguments


def checked_tools(tools: Any) -> list[Message] | None:
    """The tools of a request; None for none. Raises BadRequest."""
    if not tools:
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise BadRequest("tools: not a list")
    for number, tool in enumerate(tools):
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise BadRequest(f"tools[{number}]: only functions can be offered")
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRequest(f"tools[{number}]: a function without a name")
    return [dict(tool) for tool in tools]
