"""A session's endpoint: what agents' clients send, and what they get."""

import asyncio
import re

import aiohttp
import numpy as np
import openai
import pytest
from agents_chat import make_tokenizer
from agents_scripted import CALL, END, QUESTION, TOKENIZER, TOOLS, Scripted, endpoint

from dynamo_megatron.reward import extraction
from dynamo_megatron.rollout.agents.chat_tokens import ChatTokens
from dynamo_megatron.rollout.agents.episode import Episode, Place
from dynamo_megatron.rollout.agents.worker import ChatError
from dynamo_megatron.rollout.agents.worker import Session as AgentSession
from dynamo_megatron.rollout.client import Response


def run(work, *texts, **limits):
    """`work` with an OpenAI client, the agent's own handle of the session, and what answers."""

    async def go():
        scripted = Scripted(*texts, **limits)
        async with endpoint(scripted) as url, openai.AsyncOpenAI(base_url=url, api_key="any") as client:
            return await work(client, AgentSession(url), scripted)

    return asyncio.run(go())


def test_rewards_see_special_tokens_that_mark_thinking_and_the_agent_does_not(monkeypatch):
    monkeypatch.setattr(extraction, "MARKER", re.compile(r"<\|im_start\|>"))  # as if it were one

    async def work(client, own, scripted):
        answer = await own.chat(QUESTION)
        return answer["content"], scripted.session.texts

    content, texts = run(work, "<|im_start|>it is 7")
    assert content == "it is 7" and texts == ["<|im_start|>it is 7"]


def test_an_openai_client_runs_a_tool_loop_whose_ids_go_on():
    async def work(client, own, scripted):
        messages = list(QUESTION)
        first = await client.chat.completions.create(
            model="m", messages=messages, tools=TOOLS, temperature=0, store=False
        )
        (call,) = first.choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments) == ("add", '{"a": 3, "b": 4}')
        assert first.choices[0].finish_reason == "tool_calls" and first.choices[0].message.content == "use it"
        messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "7"}]
        second = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        assert second.choices[0].message.content == "it is 7" and second.choices[0].finish_reason == "stop"
        assert (await client.models.list()).data[0].id == "policy"
        assert second.usage.completion_tokens == len(scripted.session.episode.turns[1].response.tokens)
        return scripted

    scripted = run(work, "use it " + CALL, "it is 7")
    episode = scripted.session.episode
    assert not episode.reasons and len(episode.segments) == 1
    assert scripted.asked[1][0][: len(episode.turns[0].ids)] == episode.turns[0].ids
    assert scripted.session.texts == ["use it", "it is 7"] and set(scripted.session.ignored) == {"temperature"}
    assert scripted.session.counts == {"turns": 2, "segments": 1}


def test_a_tool_call_that_is_only_thought_of_is_none():
    async def work(client, own, scripted):
        return [await own.chat(QUESTION, tools=TOOLS) for _ in range(len(texts))]

    thoughts = f"<think>\n{CALL}?\n</think>\n\n"
    texts = [thoughts + "it is 7", f"<think>\n{CALL}", thoughts + "use it " + CALL, CALL + "</think>"]
    *without, called, with_marker = run(work, *texts)
    assert [answer["content"] for answer in without] == texts[:2] and not any("tool_calls" in a for a in without)
    assert called["content"] == thoughts + "use it" and len(called["tool_calls"]) == 1
    assert re.fullmatch("[0-9a-z]{9}", called["tool_calls"][0]["id"]), "Mistral's templates take no other"
    assert len(with_marker["tool_calls"]) == 1, "an answer that does not begin with thoughts has none"


def test_a_stream_has_the_same_answer_and_goes_on():
    async def work(client, own, scripted):
        messages = list(QUESTION)
        stream = await client.chat.completions.create(
            model="m", messages=messages, tools=TOOLS, stream=True, stream_options={"include_usage": True}
        )
        events = [event async for event in stream]
        deltas = [event.choices[0].delta for event in events if event.choices]
        text = "".join(delta.content or "" for delta in deltas)
        (call,) = [c for delta in deltas for c in delta.tool_calls or []]
        assert text == "use it" and call.function.name == "add" and call.index == 0
        assert events[-1].usage.total_tokens > 0 and events[-2].choices[0].finish_reason == "tool_calls"
        function = {"name": call.function.name, "arguments": call.function.arguments}
        answer = {"role": "assistant", "content": text}
        answer["tool_calls"] = [{"id": call.id, "type": "function", "function": function}]
        messages += [answer, {"role": "tool", "tool_call_id": call.id, "content": "7"}]
        stream = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS, stream=True)
        return scripted, "".join([e.choices[0].delta.content or "" async for e in stream])

    scripted, text = run(work, "use it " + CALL, "größer 日本 😀")
    assert text == "größer 日本 😀" and len(scripted.session.episode.segments) == 1


def test_the_agents_own_handle_needs_no_client():
    async def work(client, own, scripted):
        messages = list(QUESTION)
        messages.append(await own.chat(messages))
        messages.append({"role": "user", "content": "sure?"})
        messages.append(await own.chat(messages, stop=["###"], max_tokens=50))
        with pytest.raises(ChatError, match="turns: the episode has had its 2 turns"):
            await own.chat([*messages, *QUESTION])
        return scripted, messages

    scripted, messages = run(work, "seven", "yes### no", turns=2)
    assert [m["content"] for m in messages] == [QUESTION[0]["content"], "seven", "sure?", "yes"]
    assert not scripted.session.episode.reasons and scripted.session.counts["limit_turns"] == 1
    assert scripted.asked[1][1:3] == (50, ("###",))


def test_completions_take_and_give_token_ids():
    async def work(client, own, scripted):
        ids = TOKENIZER.encode("how much?")
        first = await client.completions.create(model="m", prompt=ids)
        more = [*ids, *first.choices[0].token_ids, *TOKENIZER.encode(" sure?")]
        await client.completions.create(model="m", prompt=more)
        text = await client.completions.create(model="m", prompt="how much?")
        stream = await client.completions.create(model="m", prompt="x", stream=True)
        return scripted, first.choices[0].text, text.choices[0].text, [e.choices[0].text async for e in stream]

    scripted, first, third, streamed = run(work, "7", "yes", "8", "9")
    assert (first, third, streamed) == ("7", "8", ["9"])
    assert [len(s) for s in scripted.session.episode.segments] == [2, 1, 1]
    assert scripted.session.counts["branched"] == 1  # the text is the ids of the first request


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"messages": []}, "at least one"),
        ({"logprobs": True}, "not supported"),
        ({"response_format": {"type": "json_object"}}, "not supported"),
        ({"tool_choice": "required"}, "auto or none"),
        ({"messages": [*QUESTION, {"role": "assistant", "content": "it"}]}, "from its beginning"),
        ({"max_tokens": 0}, "at least 1"),
        ({"stop": [3]}, "stop"),
        ({"tools": [{"type": "web"}]}, "only functions"),
        ({"tools": [{"type": "function", "function": {"name": 3}}]}, r"tools\[0\].function.name: 3"),
    ],
)
def test_what_would_be_no_sample_of_the_policy_is_refused_and_not_sent_again(fields, why):
    async def work(client, own, scripted):
        with pytest.raises(openai.BadRequestError, match=why):
            await client.chat.completions.create(**{"model": "m", "messages": QUESTION, "extra_body": fields})
        return scripted

    assert not run(work).asked


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"messages": [', "line 1 column"),
        (b"[" * 100_000, "the request: not in the form of the API (RecursionError"),
        (b'{"messages": ["how?"]}', "messages[0]: not in the form of the API (AttributeError"),
        (b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "messages[0]: not in the form of the API"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "the chat template or the tokenizer fails"),
        (b'{"messages": [{"role": "user", "content": ""}], "tools": 7}', "tools: not in the form of the API"),
    ],
)
def test_a_malformed_request_is_refused_and_the_episode_goes_on(body, why):
    async def work(client, own, scripted):
        async with aiohttp.ClientSession() as session, session.post(own.base_url + "/chat/completions", data=body) as r:
            assert r.status == 400 and why in (await r.json())["error"]["message"]
        return await own.chat(QUESTION)

    assert run(work, "seven")["content"] == "seven"


def test_a_template_without_an_end_repeats_no_token_that_ended_an_answer():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' + m.content }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
    )
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")  # ends an answer and begins a message, as in GLM-4
    held = [*QUESTION, {"role": "assistant", "content": "seven"}]
    added = ChatTokens(tokenizer, [start]).added(held, QUESTION, None, start)
    assert tokenizer.decode(added) == f"user\n{QUESTION[0]['content']}<|im_start|>assistant\n"


def test_what_follows_an_answer_is_what_the_template_says_of_it():
    """DeepSeek-R1 drops thoughts at once; DeepSeek-Coder puts a new line before the token that ends an answer."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{%- for m in messages -%}{{ '<|im_start|>' + m.content.split('</think>')[-1] + '\n<|im_end|>' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|im_start|>' }}{%- endif -%}"
    )
    chat = ChatTokens(tokenizer, [END])
    seven, thought = (
        [*QUESTION, {"role": "assistant", "content": text}] for text in ("seven", "I add them</think>seven")
    )
    added = tokenizer.decode(chat.added(seven, QUESTION, None, END))
    assert added == f"<|im_start|>{QUESTION[0]['content']}\n<|im_end|><|im_start|>"
    assert chat.added(thought, QUESTION, None, END) is None
    assert chat.thoughts_end(tokenizer.encode("sum? <think>\n"), "a</think> b") == 10


def test_tokens_and_context_are_limits_of_the_episode():
    async def tokens(client, own, scripted):
        messages = [*QUESTION, await own.chat(QUESTION), *QUESTION]
        cut = await own.chat(messages)
        with pytest.raises(ChatError, match="has its 8 tokens"):
            await own.chat([*messages, cut, *QUESTION])
        return scripted.session

    async def as_asked_for(client, own, scripted):
        await own.chat(QUESTION, max_tokens=8)
        return scripted.session

    async def context(client, own, scripted):
        with pytest.raises(ChatError, match="tokens, of at most 10"):
            await own.chat(QUESTION)
        return scripted.session

    session = run(tokens, "seven", "a much longer answer than that", tokens=8)
    assert sum(len(turn.response.tokens) for turn in session.episode.turns) == 8
    assert session.counts["limit_tokens"] == 1 and session.episode.turns[1].response.finish_reason == "length"
    assert run(as_asked_for, "a much longer answer than that", tokens=8).counts["limit_tokens"] == 1
    assert run(context, length=10).counts == {"turns": 0, "segments": 0, "limit_context": 1}


def test_parallel_requests_never_get_more_tokens_than_there_are():
    async def work(client, own, scripted):
        scripted.delay = 0.05
        answers = await asyncio.gather(*(own.chat(QUESTION) for _ in range(4)), return_exceptions=True)
        return scripted.session, answers

    session, answers = run(work, "seven", "nine", "it is", "so", tokens=12)
    sampled = sum(len(turn.response.tokens) for turn in session.episode.turns)
    assert sampled <= 12 and len(session.episode.turns) > 1
    assert all(isinstance(a, dict | ChatError) for a in answers)


def test_the_routes_of_a_segment_are_those_of_the_turns_that_its_tokens_are_from():
    async def work(client, own, scripted):
        messages = [*QUESTION, await own.chat(QUESTION)]
        again = [{"role": "user", "content": "and now?"}]
        for _ in range(2):  # the second one begins a segment with the ids of the first turn
            await own.chat(messages + again)
        return scripted.session.episode

    episode = run(work, "seven", "eight", "nine")
    first, second, third = (turn.response.routes for turn in episode.turns)
    trained = episode.trained
    assert trained.record.starts == [0, len(first) + len(second)] and len(trained.routes) == len(trained.sequence)
    np.testing.assert_array_equal(trained.routes, np.concatenate([first, second, first, third]))
    for number, turn in enumerate(trained.record.turns):
        assert {n for n, _ in trained.routes[turn.start : turn.end, 0].tolist()} == {number}
    places = trained.routes[:, 0, 1].tolist()
    assert places == [*range(trained.record.starts[1]), *range(len(places) - trained.record.starts[1])]


def test_a_turn_without_routes_leaves_the_others_theirs():
    episode, known = Episode(None), np.ones((3, 1, 2), np.uint8)
    first = episode.record(Place(None, [1, 2]), Response([3], [-1.0], [(0, 0, 1)], "stop"), None)
    episode.record(Place(first, [4]), Response([5, 6], [-1.0] * 2, [(0, 0, 2)], "stop", routes=known), None)
    np.testing.assert_array_equal(episode.trained.routes, np.concatenate([0 * known + 255, known]))


def test_an_answer_that_nobody_waits_for_ends_and_is_not_trained():
    async def work(client, own, scripted):
        scripted.delay = 30.0
        asking = asyncio.create_task(own.chat(QUESTION))
        while not scripted.asked:
            await asyncio.sleep(0.01)
        asking.cancel()
        while not scripted.cancelled:
            await asyncio.sleep(0.01)
        scripted.delay = 0.0
        await own.chat(QUESTION)
        return scripted

    scripted = run(work, "lost", "seven")
    assert scripted.cancelled == 1 and scripted.session.counts == {"turns": 1, "segments": 1, "abandoned": 1}


def test_nobody_else_reaches_a_session():
    async def work(client, own, scripted):
        base = own.base_url.rsplit("/", 2)[0]
        async with aiohttp.ClientSession() as http:
            for path in ("/v1/chat/completions", "/guessed/v1/chat/completions"):
                async with http.post(base + path, json={"messages": QUESTION}) as reply:
                    assert reply.status == 404
        assert base.startswith("http://127.0.0.1:") and len(own.base_url.split("/")[3]) >= 20

    run(work)
