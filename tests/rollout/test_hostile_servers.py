"""What a server writes is never followed, never unbounded, and never drives a terminal."""

import asyncio
import contextlib
import gzip

import pytest
from aiohttp import web
from stand_ins import VOCABULARY, Server, event, listening, open_stream, reply

from dynamo_megatron.config import RolloutConfig
from dynamo_megatron.rollout.batching import BYTES_A_TOKEN, SMALLEST_LIMIT
from dynamo_megatron.rollout.client import ServerLost, SGLangClient, open_session
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.rollout.servers.endpoint import Endpoint
from dynamo_megatron.rollout.servers.server_api import ServerError, call

ESCAPES = "\x1b[2J\x1b]0;title\x07two\nlines\u202e\u2028\x9b31m" + "a" * 1000
LIMIT = SMALLEST_LIMIT + BYTES_A_TOKEN * 6


def run(server: Server, work):
    async def with_client():
        async with listening(server) as url, open_session() as session, asyncio.timeout(60):
            config = RolloutConfig(max_new_tokens=6, timeout=30.0)
            return await work(SGLangClient(session, Endpoint("s", 1, url, 1, "secret"), config, [], VOCABULARY))

    return asyncio.run(with_client())


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_takes_no_prompt_and_no_key_elsewhere(status):
    async def work(asked):
        found = []
        for ask in (lambda: asked.generate("r", [1]), asked.model_info, asked.rest, lambda: asked.kv_cache_share(30)):
            with pytest.raises((ServerLost, RolloutError)) as error:
                await ask()
            found.append(str(error.value))
        assert not await asked.healthy(10)
        return found

    async def both():
        elsewhere = Server()
        async with listening(elsewhere) as other:

            async def redirect(request):
                return web.Response(status=status, headers={"Location": other + request.path})

            class Redirecting(Server):
                generate = answer = load = health = abort = staticmethod(redirect)

            found = await asyncio.to_thread(run, Redirecting(), work)
        return found, elsewhere.asked

    found, asked = asyncio.run(both())
    assert asked == [] and sum(str(status) in message for message in found) == 4, found


def endless(sent: list[int], headers: dict[str, str], part: bytes):
    """A reply that does not end; `sent` gets its bytes."""

    async def answer(request):
        stream = web.StreamResponse(headers=headers)
        await stream.prepare(request)
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                await stream.write(part)
                sent.append(len(part))
        return stream

    return answer


BOMB = gzip.compress(bytes(64 << 20))
BODIES = {
    "endless JSON": ({"Content-Type": "application/json"}, b"[" * 65536),
    "an endless page": ({"Content-Type": "text/html"}, b"<p>" * 20000),
    "a gzip bomb": ({"Content-Type": "application/json", "Content-Encoding": "gzip"}, BOMB),
}


@pytest.mark.parametrize("body", BODIES)
def test_a_body_is_read_up_to_what_an_honest_one_can_have(body):
    sent: list[int] = []
    hostile = endless(sent, *BODIES[body])

    class Hostile(Server):
        generate = answer = load = staticmethod(hostile)

    async def work(asked):
        said = []
        for ask in (lambda: asked.generate("r", [1]), asked.model_info, lambda: asked.kv_cache_share(30)):
            with pytest.raises((ServerLost, RolloutError)) as error:
                await ask()
            said.append(str(error.value))
        return said

    said = run(Hostile(), work)
    assert all("a reply of more than" in message for message in said), said
    assert sum(sent) < 3 * (LIMIT + (8 << 20))  # and what was on its way


def test_an_endless_event_of_a_list_is_left_and_its_requests_are_asked_alone():
    sent: list[int] = []

    async def lists(request, rids):
        stream = await open_stream(request)
        await stream.write(event(reply(rids[0])))
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                await stream.write(b"data: {" + b" " * 65536)
                sent.append(65536)
        return stream

    async def work(asked):
        return await asyncio.gather(*(asked.generate(name, [1]) for name in ("a", "b")))

    server = Server(lists=lists)
    assert [r.error for r in run(server, work)] == ["", ""] and server.asked == [["a", "b"], "alone-b"]
    assert sum(sent) < LIMIT + (8 << 20)


def plain(said: str) -> bool:
    return said.isprintable() and len(said) < 600


@pytest.mark.parametrize("status", [200, 400, 401, 503])
@pytest.mark.parametrize("shape", ["error", "message", "text", "page"])
def test_words_of_a_server_are_one_plain_line(status, shape):
    async def answer(request):
        body = {"error": {"message": ESCAPES}} if shape == "error" else {"message": ESCAPES}
        if shape in ("text", "page"):
            return web.Response(status=status, text=ESCAPES, content_type="text/html")
        return web.json_response(body, status=status)

    class Talking(Server):
        generate = load = staticmethod(answer)

    Talking.answer = staticmethod(answer)

    async def work(asked):
        said = []
        for ask in (lambda: asked.generate("r", [1]), asked.rest, lambda: asked.kv_cache_share(30)):
            try:
                made = await ask()
                said += [made.error] if made is not None else []
            except (ServerLost, RolloutError) as error:
                said.append(str(error))
        return said

    said = run(Talking(), work)
    assert said and all(map(plain, said)), said


@pytest.mark.parametrize(
    "finish",
    [{"type": "abort", "message": ESCAPES}, {"type": "stop", "matched": ESCAPES}, {"type": ESCAPES}],
    ids=lambda finish: finish["type"][:5],
)
def test_what_ends_a_response_is_told_in_one_plain_line(finish):
    async def work(asked):
        try:
            return (await asked.generate("r", [1])).error
        except ServerLost as error:
            return str(error)

    said = run(Server(lambda name, number: web.json_response(reply(f"{name};", finish=finish))), work)
    assert said and plain(said), said


def test_bytes_that_are_no_http_are_told_in_one_plain_line():
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"\x1b[2JHTTP/9 \x07\r\n\x1b]0;a\r\n\r\n")
        writer.close()

    async def work():
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with open_session() as session:
            asked = SGLangClient(session, Endpoint("s", 1, url, 1, ""), RolloutConfig(), [])
            said = []
            for ask in (lambda: asked.generate("r", [1]), asked.model_info):
                with pytest.raises((ServerLost, RolloutError)) as error:
                    await ask()
                said.append(str(error.value))
        server.close()
        return said

    said = asyncio.run(work())
    assert all(map(plain, said)), said


@pytest.mark.parametrize("share", ["NaN", "1e400", "-1", "7", "1" + "0" * 400, '"full"', "null", "[]"])
def test_a_load_that_is_no_share_is_none(share):
    class Loaded(Server):
        async def load(self, request):
            return web.Response(text=f'{{"loads": [{{"token_usage": {share}}}]}}', content_type="application/json")

    with pytest.raises(RolloutError, match="does not tell its load"):
        run(Loaded(), lambda asked: asked.kv_cache_share(30))


def test_own_words_of_anything():
    own_words = Endpoint("s", 1, "http://h", 1, "").own_words
    for said in (ESCAPES, {"error": ESCAPES}, {"message": {"a": [ESCAPES]}}, [1, "x" * 10_000_000], None, 7):
        assert plain(own_words(said))


@pytest.mark.parametrize("status", [400, 403, 500])
def test_a_key_that_a_server_repeats_is_not_shown(status):
    async def repeat(request):
        said = f"no rights for {request.headers['Authorization']}"
        return web.json_response({"error": {"message": said}}, status=status)

    class Repeating(Server):
        generate = answer = load = abort = staticmethod(repeat)

    async def said(asking) -> str:
        try:
            return (await asking).error
        except (ServerLost, RolloutError, ServerError) as error:
            return str(error)

    async def work():
        async with listening(Repeating()) as url, open_session() as session, asyncio.timeout(60):
            endpoint = Endpoint("s", 1, url, 1, "key/of-the-fleet")
            asked = SGLangClient(session, endpoint, RolloutConfig(), [], VOCABULARY)
            pushing = asyncio.to_thread(call, endpoint, "/model_info", None, 30)
            askings = (asked.generate("r", [1]), asked.model_info(), asked.rest(), asked.kv_cache_share(30), pushing)
            return [await said(asking) for asking in askings]

    found = asyncio.run(work())
    assert all("no rights for Bearer [API key]" in text for text in found), found
