"""The route for Anthropic's clients: what it takes and gives, and that it is the same session."""

import asyncio
import json

import aiohttp
import pytest
from agents_scripted import CALL, Scripted, endpoint

from dynamo_megatron.rollout.agents.anthropic_messages import chat_request
from dynamo_megatron.rollout.agents.messages import normalised

QUESTION = [{"role": "user", "content": "how much is 3 + 4?"}]
OFFERED = [{"name": "add", "description": "adds", "input_schema": {"type": "object", "properties": {}}}]
ASKED = {"model": "m", "max_tokens": 50, "messages": QUESTION}


def run(work, *texts, **limits):
    """`work(post, scripted)`; post(fields, path) -> (status, text of the answer)"""

    async def go():
        scripted = Scripted(*texts, **limits)
        async with endpoint(scripted) as url, aiohttp.ClientSession() as http:

            async def post(fields, path="/messages"):
                async with http.post(url + path, json=fields) as reply:
                    return reply.status, await reply.text()

            return await work(post, scripted)

    return asyncio.run(go())


def test_a_tool_loop_whose_ids_go_on():
    async def work(post, scripted):
        system = [{"type": "text", "text": "be short", "cache_control": {"type": "ephemeral"}}]
        asked = {**ASKED, "system": system, "tools": OFFERED, "temperature": 0.3}
        status, text = await post(asked)
        first = json.loads(text)
        assert (status, first["type"], first["role"], first["stop_reason"]) == (200, "message", "assistant", "tool_use")
        said, call = first["content"]
        assert said == {"type": "text", "text": "use it"}
        assert (call["type"], call["name"], call["input"]) == ("tool_use", "add", {"a": 3, "b": 4})
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "7"}]}
        more = {"type": "text", "text": "so?", "cache_control": {"type": "ephemeral"}}
        history = [*QUESTION, {"role": "assistant", "content": first["content"]}]
        _, text = await post({**asked, "messages": [*history, {"role": "user", "content": [result, more]}]})
        return scripted, first, json.loads(text)

    scripted, first, second = run(work, "use it " + CALL, "it is 7")
    episode = scripted.session.episode
    assert second["content"] == [{"type": "text", "text": "it is 7"}] and second["stop_reason"] == "end_turn"
    assert not episode.reasons and len(episode.segments) == 1 and set(scripted.session.ignored) == {"temperature"}
    assert [m["role"] for m in episode.turns[1].messages] == [
        *("system", "user", "assistant", "tool", "user", "assistant")
    ]
    assert episode.turns[0].place.tools[0]["function"]["parameters"] == OFFERED[0]["input_schema"]
    for turn, answer in zip(episode.turns, (first, second), strict=True):
        used = {"input_tokens": len(turn.place.ids), "output_tokens": len(turn.response.tokens)}
        assert answer["usage"] == used


def test_events_of_a_stream_add_up_to_the_answer():
    async def work(post, scripted):
        return await post({**ASKED, "tools": OFFERED, "stream": True})

    _, text = run(work, "größer " + CALL)
    lines = [part.split("\n") for part in text.strip().split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in lines]
    assert [name for name, _ in lines] == [f"event: {event['type']}" for event in events]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [event["type"] for event in events] == ["message_start", *block, *block, "message_delta", "message_stop"]
    assert events[0]["message"]["content"] == [] and events[0]["message"]["usage"]["input_tokens"] > 0
    assert [e["index"] for e in events[1:-2]] == [0, 0, 0, 1, 1, 1]
    assert events[2]["delta"] == {"type": "text_delta", "text": "größer"}
    assert events[4]["content_block"]["input"] == {} and events[4]["content_block"]["name"] == "add"
    assert json.loads(events[5]["delta"]["partial_json"]) == {"a": 3, "b": 4}
    assert events[-2]["delta"]["stop_reason"] == "tool_use" and events[-2]["usage"]["output_tokens"] > 0


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"messages": []}, "at least one"),
        ({"messages": [{"role": "tool", "content": "7"}]}, "'tool' is none of"),
        ({"messages": [{"content": "7"}]}, "the request: not in the form of the API (KeyError: 'role')"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "of type 'image'"),
        ({"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}]}]}, "type 'thinking'"),
        ({"system": [IMAGE]}, "system: a block of type 'image'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "which the agent carries out"),
        ({"tool_choice": {"type": "any"}}, "auto or none"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "not supported"),
    ],
)
def test_what_would_be_no_sample_or_no_text_is_refused(fields, why):
    async def work(post, scripted):
        return await post({**ASKED, **fields}), scripted.asked

    (status, text), asked = run(work)
    error = json.loads(text)
    assert status == 400 and error["type"] == "error" and why in error["error"]["message"] and not asked


def test_results_of_tools_and_texts_keep_their_order():
    result = {"type": "tool_result", "tool_use_id": "a", "content": "7", "is_error": False}
    blocks = [result, {**result, "tool_use_id": "b", "content": []}]
    texts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    found = chat_request({"messages": [{"role": "user", "content": [*blocks, *texts]}]})["messages"]
    assert normalised(found) == [
        {"role": "tool", "content": "7", "tool_call_id": "a"},
        {"role": "tool", "content": "", "tool_call_id": "b"},
        {"role": "user", "content": "one\ntwo"},
    ]
    mixed = [texts[0], result, texts[1]]
    found = chat_request({"messages": [{"role": "user", "content": mixed}]})["messages"]
    assert [(m["role"], m["content"]) for m in found] == [("user", "one"), ("tool", "7"), ("user", "two")]
    answer = {"role": "assistant", "content": []}
    assert chat_request({"messages": [answer]})["messages"] == [{"role": "assistant", "content": ""}]
