"""Messages and tools as OpenAI's chat completions have them, in the one form that sessions compare and render. Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dynamo_megatron.runtime import plain_json
from dynamo_megatron.runtime.plain_text import error_line

Message = dict[str, Any]
MALFORMED = (AttributeError, LookupError, TypeError, RecursionError)  # raised by code that reads another form
ROLES = ("system", "user", "assistant", "tool")


class BadRequest(ValueError):
    """What an agent asked for cannot be answered. One line, which the agent gets."""


class LimitReached(BadRequest):
    """A limit of the episode refuses the request."""


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Around code that reads `what` of a request. Raises BadRequest where a field is missing or of another type."""
    try:
        yield
    except MALFORMED as error:
        raise BadRequest(f"{what}: not in the form of the API ({error_line(error, 200)})") from None


def normalised(messages: Any) -> list[Message]:
    """The messages of a request: role, content (a text), and what there is of tool calls, tool_call_id and name.

    Arguments of tool calls become objects, as templates expect them. Other fields are left out: clients send back
    whatever they were given. Raises BadRequest.
    """
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages: give a list of at least one message")
    return [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _message(message: Mapping[str, Any], where: str) -> Message:
    with reading(where):
        role = "system" if message.get("role") == "developer" else message.get("role")
        if role not in ROLES:
            raise BadRequest(f"{where}.role: {role!r:.40} is none of {', '.join(ROLES)}")
        found: Message = {"role": role, "content": _text(message.get("content") or "", where)}
        if calls := message.get("tool_calls"):
            found["tool_calls"] = normalised_calls(calls, where)
        return found | {n: str(message[n]) for n in ("tool_call_id", "name") if message.get(n) is not None}


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
    arguments = plain_json.object_in(call["function"].get("arguments"))
    function = {"name": call["function"]["name"], "arguments": {} if arguments is None else arguments}
    return {"id": str(call.get("id", "")), "type": "function", "function": function}


def checked_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Message] | None:
    """The tools of a request; None for none. Raises BadRequest, also for what SGLang's parser refuses."""
    with reading("tools"):
        for number, tool in enumerate(tools or ()):
            if tool["type"] != "function":
                raise BadRequest(f"tools[{number}]: only functions can be offered")
            function = tool["function"]
            for name, kind in (("name", str), ("description", str | None), ("parameters", dict | None)):
                if not isinstance(function.get(name), kind):
                    raise BadRequest(f"tools[{number}].function.{name}: {function.get(name)!r:.40} is of another type")
        return [dict(tool) for tool in tools] if tools else None
