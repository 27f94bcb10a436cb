"""Anthropic's messages as requests of chat completions, and answers back: the session knows one form alone. Pure."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dynamo_megatron.rollout.agents.messages import BadRequest, Message, arguments_of

TRANSLATED = ("system", "messages", "tools", "tool_choice", "stop_sequences")
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def chat_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """The same request as one of chat completions. Fields without a counterpart stay, so that the session names them.

    Text, tool_use and tool_result blocks are translated, `cache_control` in them is ignored. Raises BadRequest for
    other blocks and for tools that Anthropic's servers would carry out.
    """
    asked = {name: value for name, value in request.items() if name not in TRANSLATED}
    asked["messages"] = [m for number, message in enumerate(request["messages"]) for m in _messages(message, number)]
    if system := request.get("system"):
        asked["messages"].insert(0, {"role": "system", "content": _text(system, "system")})
    asked["tools"] = [_tool(tool, number) for number, tool in enumerate(request.get("tools") or ())]
    if (choice := request.get("tool_choice")) is not None:
        asked["tool_choice"] = choice["type"]
        asked["disable_parallel_tool_use"] = choice.get("disable_parallel_tool_use")
    asked["stop"] = request.get("stop_sequences")
    if output := request.get("output_config"):
        asked["response_format"] = output.get("format")
    return asked


def _messages(message: Mapping[str, Any], number: int) -> Iterator[Message]:
    """Of one message: results of tools are messages of their own."""
    where, role, content = f"messages[{number}]", message["role"], message["content"]
    if role not in ("user", "assistant", "system"):
        raise BadRequest(f"{where}.role: {role!r:.40} is none of user, assistant, system")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts: list[Mapping[str, Any]] = []
    calls: list[Message] = []
    for block in blocks:
        if role == "user" and block.get("type") == "tool_result":
            if texts:
                yield {"role": role, "content": _text(texts, where)}
                texts = []
            result = _text(block.get("content") or "", f"{where}: a tool_result")
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
        elif role == "assistant" and block.get("type") == "tool_use":
            called = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": called})
        else:
            texts.append(block)
    if texts or role != "user" or not blocks:
        yield {"role": role, "content": _text(texts, where), **({"tool_calls": calls} if calls else {})}


def _text(content: str | Sequence[Mapping[str, Any]], where: str) -> str:
    """Blocks of text are lines."""
    if isinstance(content, str):
        return content
    for block in content:
        if block["type"] != "text":
            kind = f"{block['type']!r:.40}"
            raise BadRequest(f"{where}: a block of type {kind}; only text, tool_use and tool_result are understood")
    return "\n".join(block["text"] for block in content)


def _tool(tool: Mapping[str, Any], number: int) -> Message:
    if tool.get("type") not in (None, "custom"):
        raise BadRequest(f"tools[{number}]: only tools with an input_schema, which the agent carries out")
    function = {
        "name": tool["name"],
        "description": tool.get("description"),
        "parameters": tool["input_schema"],
    }
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def message_of(completion: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of chat completions as a message."""
    (choice,) = completion["choices"]
    answer, usage, finish = choice["message"], completion["usage"], choice["finish_reason"]
    stopped_by = choice["matched_stop"] if finish == "stop" else None
    content: list[dict[str, Any]] = [{"type": "text", "text": answer["content"]}] if answer["content"] else []
    for call in answer.get("tool_calls", ()):
        given = arguments_of(call["function"])
        block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}
        content.append({**block, "input": given if isinstance(given, dict) else {}})
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": completion["model"],
        "content": content,
        "stop_reason": STOP_REASONS[finish] if stopped_by is None else "stop_sequence",
        "stop_sequence": stopped_by,
        "usage": {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]},
    }


def events_of(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A finished message as the events of a stream."""
    ends, usage = ("stop_reason", "stop_sequence"), message["usage"]
    begun = {**message, "content": [], **dict.fromkeys(ends), "usage": {**usage, "output_tokens": 0}}
    yield {"type": "message_start", "message": begun}
    for index, block in enumerate(message["content"]):
        if block["type"] == "text":
            empty = {**block, "text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    yield {"type": "message_delta", "delta": {name: message[name] for name in ends}, "usage": usage}
    yield {"type": "message_stop"}
