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


def normalised(messages: Sequence[Mapping[str, Any]] | None) -> list[Message]:
    """The messages of a request: role, content (a text), and what there is of tool calls, tool_call_id and name.

    Arguments of tool calls become objects, as templates expect them. Other fields are left out: clients send back
    whatever they were given. Raises BadRequest.
    """
    if not messages:
        raise BadRequest("messages: give a list of at least one message")
    return [_message(message, number) for number, message in enumerate(messages)]


def _message(message: Mapping[str, Any], number: int) -> Message:
    where = f"messages[{number}]"
    role = "system" if message.get("role") == "developer" else message.get("role")
    if role not in ROLES:
        raise BadRequest(f"{where}.role: {role!r:.40} is none of {', '.join(ROLES)}")
    found: Message = {"role": role, "content": _text(message.get("content") or "", where)}
    if calls := message.get("tool_calls"):
        found["tool_calls"] = normalised_calls(calls, where)
    for name in ("tool_call_id", "name"):
        if message.get(name) is not None:
            found[name] = str(message[name])
    return found


def _text(content: str | Sequence[Mapping[str, Any]], where: str) -> str:
    if isinstance(content, str):
        return content
    if any(part["type"] != "text" for part in content):
        raise BadRequest(f"{where}.content: a part that is no text")
    return "".join(part["text"] for part in content)


def normalised_calls(calls: Any, where: str) -> list[Message]:
    """The tool calls of a message, with arguments as objects. `where`: the message, for errors. Raises BadRequest."""
    try:
        return [_call(call) for call in calls]
    except (AttributeError, LookupError, TypeError):
        raise BadRequest(f"{where}.tool_calls: not a list of calls, each with a function's name") from None


def _call(call: Mapping[str, Any]) -> Message:
    arguments = arguments_of(call["function"])
    function = {"name": call["function"]["name"], "arguments": {} if arguments is None else arguments}
    return {"id": str(call.get("id", "")), "type": "function", "function": function}


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


def checked_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Message] | None:
    """The tools of a request; None for none. Raises BadRequest."""
    for number, tool in enumerate(tools or ()):
        if tool["type"] != "function":
            raise BadRequest(f"tools[{number}]: only functions can be offered")
    return [dict(tool) for tool in tools] if tools else None
