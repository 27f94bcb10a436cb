"""Requests that share an HTTP request: each is answered when it is finished, and fails alone."""

import asyncio
import json
import math
from types import SimpleNamespace

import pytest
from aiohttp import web
from stand_ins import ABORTED, Server, event, listening, open_stream, reply

from dynamo_megatron.config import RolloutConfig
from dynamo_megatron.rollout.client import LARGEST, ServerLost, SGLangClient, open_session
from dynamo_megatron.rollout.servers.server_api import Endpoint
from dynamo_megatron.runtime.routes import RouteShape

END = 5  # the token that ends a response


def run(server: Server, work, **options):
    async def with_client():
        async with listening(server) as url, open_session() as session:
            async with asyncio.timeout(120):
                return await work(SGLangClient(session, Endpoint("s", 1, url, 1, ""), RolloutConfig(**options), [END]))

    return asyncio.run(with_client())


def test_requests_of_one_moment_share_http_requests():
    async def work(client):
        first = await asyncio.gather(*(client.generate(f"r{i}", [1]) for i in range(LARGEST + 2)))
        return [*first, await client.generate("later", [1])]

    server = Server(lists=True)
    responses = run(server, work)
    names = [f"r{i}" for i in range(LARGEST + 2)]
    assert server.asked == [names[:LARGEST], names[LARGEST:], "later"]
    assert all(r.error == "" and r.tokens == [7] * 3 for r in responses)


def test_a_response_does_not_wait_for_the_others_of_its_list():
    async def work(client):
        asked = {name: asyncio.create_task(client.generate(name, [1])) for name in ("slow", "a", "b")}
        done, pending = await asyncio.wait(asked.values(), timeout=10, return_when=asyncio.FIRST_COMPLETED)
        while len(done) < 2:
            done, pending = await asyncio.wait(asked.values(), timeout=0.01)
        assert pending == {asked["slow"]}
        finish.set()
        return await asked["slow"]

    finish = asyncio.Event()

    async def behaviour(rid, number):
        if rid == "slow":
            await finish.wait()

    assert run(Server(behaviour, lists=True), work).error == ""


def test_a_stop_text_is_looked_for_where_every_token_of_it_is_one_byte():
    """SGLang looks at the last tokens, as many as the text has by itself, unless something longer is asked for."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    server = Server()
    run(server, lambda client: client.generate("r", [1], stop=["</answer>é"]), stop=["x"])
    run(server, lambda client: client.generate("none", [1]))
    params = SamplingParams(**server.sampling["r"])
    params.normalize(SimpleNamespace(encode=lambda text, **options: [0]))
    assert params.stop_regex_max_len == len("</answer>é".encode()) and params.stop_strs == ["x", "</answer>é"]
    assert "stop_regex" not in server.sampling["none"]


def ask(client, *names):
    return asyncio.gather(*(client.generate(name, [1]) for name in names), return_exceptions=True)


def answers(*contents):
    """A server's answer to a list: these events. A bytes object is sent as it is, a callable gets the request ids."""

    async def lists(request, rids):
        stream = await open_stream(request)
        for content in contents:
            content = content(rids) if callable(content) else content
            await stream.write(content if isinstance(content, bytes) else event(content))
        return stream

    return lists


FAULT = {"error": {"message": "one of them is at fault"}}


def test_an_abort_with_a_status_is_a_refusal_of_that_request():
    too_long = {"type": "abort", "message": "too long", "status_code": 400}
    server = Server(lists=answers(lambda rids: reply(rids[0], 1, too_long), lambda rids: reply(rids[1])))
    refused, answered = run(server, lambda client: ask(client, "a", "b"))
    assert refused.finish_reason == "error" and refused.error == "a: the server refused it: too long"
    assert answered.tokens == [7] * 3 and server.asked == [["a", "b"]]


@pytest.mark.parametrize("nonsense", [b"data: {nonsense\n\n", {"meta_info": {}}, {"text": "?"}, FAULT])
def test_what_a_malformed_event_leaves_is_asked_alone(nonsense):
    server = Server(lists=answers(lambda rids: reply(rids[0]), nonsense))
    assert all(r.error == "" for r in run(server, lambda client: ask(client, "a", "b", "c")))
    assert server.asked[0] == ["a", "b", "c"] and sorted(server.asked[1:]) == ["alone-b", "alone-c"]


def test_a_list_whose_requests_are_all_cancelled_closes_its_connection():
    async def lists(request, rids):
        transports.append(request.transport)
        await (await open_stream(request)).write(event(reply(rids[0], 1, {"type": "abort", "message": "ended"})))
        await asyncio.sleep(60)

    async def work(client):
        tasks = [asyncio.create_task(client.generate(name, [1])) for name in ("a", "b", "c")]
        await tasks[0]
        tasks[1].cancel()
        tasks[2].cancel()
        while not transports[0].is_closing():  # `run` ends the wait
            await asyncio.sleep(0.01)

    transports = []
    server = Server(lists=lists)
    run(server, work)
    assert server.asked == [["a", "b", "c"]]


def test_routes_of_a_long_prompt_do_not_get_a_shorter_one_of_its_list_refused():
    async def lists(request, rids):
        payload, stream = await request.json(), await open_stream(request)
        for rid, tokens in zip(rids, payload["input_ids"], strict=True):
            too_far = payload["routed_experts_start_len"] > len(tokens)  # SGLang's own check
            finish = {"type": "abort", "message": "start_len", "status_code": 400} if too_far else None
            await stream.write(event(reply(rid, finish=finish)))
        return stream

    async def work(client):
        client.routes = RouteShape(layers=2, topk=3, experts=8)
        continued = client.generate("continued", [1] * 600, routes_from=600)
        return await asyncio.gather(client.generate("evaluation", [1] * 50), continued)

    server = Server(lists=lists)
    assert [r.error for r in run(server, work)] == ["", ""] and server.asked == [["evaluation", "continued"]]


NONSENSE = {
    "no tokens": {"output_token_logprobs": []},
    "one too many": {"output_token_logprobs": [[-1.0, 7, None]] * 5},
    "beyond the vocabulary": {"output_token_logprobs": [[-1.0, 1 << 31, None]] * 3},
    "negative": {"output_token_logprobs": [[-1.0, -1, None]] * 3},
    "text": {"output_token_logprobs": [[-1.0, "8", None]] * 3},
    "above 0": {"output_token_logprobs": [[0.01, 7, None]] * 3},
    "nan": {"output_token_logprobs": [[math.nan, 7, None]] * 3},
    "a gap": {"weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 2, "end": 3}]},
    "short": {"weight_versions": [{"version": "3", "start": 0, "end": 2}]},
    "unknown": {"finish_reason": {"type": "tool"}},
    "another end token": {"finish_reason": {"type": "stop", "matched": 8}},
    "of another request": {"id": "b;"},
}


OTHERS = {"a page": "<html>", "not json": "{", "no meta_info": '{"text": "!"}'}


def altered(changes: dict) -> str:
    return json.dumps({"meta_info": reply("a;")["meta_info"] | changes})


def one_reply(text: str, most: int = 4, **options):
    """What a client makes of the answer `text` to request "a", which asks for at most `most` tokens."""
    kind = "text/html" if text == OTHERS["a page"] else "application/json"
    server = Server(lambda name, number: web.Response(text=text, content_type=kind))
    (found,) = run(server, lambda client: ask(client, "a"), max_new_tokens=most, **options)
    return found


@pytest.mark.parametrize("text", [*map(altered, NONSENSE.values()), *OTHERS.values()], ids=[*NONSENSE, *OTHERS])
def test_a_reply_that_is_no_sample_is_nonsense_of_its_server(text):
    error = one_reply(text)
    assert isinstance(error, ServerLost) and "answers with nonsense: " in str(error) and "\n" not in str(error)


# What SGLang types as int | list[int] | str, and others leave out.
@pytest.mark.parametrize("matched", [7, [7], [3, 7], None])
def test_what_stopped_a_response_is_its_last_token_or_the_end_of_several(matched):
    response = one_reply(altered({"finish_reason": {"type": "stop", "matched": matched}}))
    assert response.error == "" and response.tokens == [7] * 3


@pytest.mark.parametrize(("most", "error"), [(5, ""), (6, "the server ended it after 3 of 6 tokens: its KV cache")])
def test_a_response_that_its_server_cuts_short_fails(most, error):
    response = one_reply(altered({"finish_reason": {"type": "length", "length": 3}}), most)
    assert error in response.error and len(response.tokens) == (0 if error else 3)


@pytest.mark.parametrize(
    ("tokens", "left"), [([7, 7, 7], ("abort", 3)), ([7, 7, END], ("stop", 3)), ([7, END, 7], ("stop", 2))]
)
def test_what_is_left_of_a_response_that_a_weight_sync_aborts(tokens, left):
    sampled = [[-1.0, token, None] for token in tokens]
    response = one_reply(altered({"finish_reason": ABORTED, "output_token_logprobs": sampled}), max_staleness=1)
    assert (response.finish_reason, len(response.tokens)) == left and response.weight_versions == [(0, 0, left[1])]
