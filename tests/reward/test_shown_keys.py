"""What an endpoint says is printed and kept without the API key, in whatever place it repeats it."""

import asyncio
import contextlib
import json

import pytest
from scoring_endpoint import PROMPT, Listening

from dynamo_megatron.config import RewardConfig
from dynamo_megatron.reward import RewardPool
from dynamo_megatron.reward.exchanges import Judge

KEY = "sk-hunter22/hunter22"


class RawEndpoint(Listening):
    """Answers every connection with the same bytes. `port` is its own."""

    def __init__(self, reply: bytes):
        self._reply = reply
        super().__init__()

    async def _serve(self):
        self._loop, self._done = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._done.wait()
        server.close()

    async def _answer(self, reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(self._reply)
            await writer.drain()
        writer.close()


def replied(status: str, headers: str = "", body: object = None) -> bytes:
    encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(encoded)}\r\n{headers}\r\n".encode() + encoded


def said(content: str) -> bytes:
    return b'{"choices": [{"message": {"content": "%s"}}]}' % content.encode()


SCORED = said("Score: 5")
ESCAPED = "".join(f"\\u{ord(c):04x}" for c in KEY)
REPLIES = {
    "reason phrase": (replied(f"401 no such key {KEY}", body=b"no"), "answered 401: no"),
    "malformed status line": (f"HTTP/1.1 who is {KEY}\r\n\r\n".encode(), "[API key]"),
    "malformed header": (replied("200 OK", f"X {KEY}\r\n", SCORED), "[API key]"),
    "header": (replied("200 OK", f"Content-Encoding: {KEY}\r\n", SCORED), "Content-Encoding [API key]"),
    "malformed cookie": (replied("401 no", f"Set-Cookie: who {KEY}=1\r\n", b"no"), "answered 401: no"),
    "body": (replied("403 no", body=KEY.encode()), "answered 403: [API key]"),
    "escaped slash": (replied("403 no", body=KEY.replace("/", "\\/").encode()), "answered 403: [API key]"),
    "escaped text": (replied("200 OK", body=said(f"no number, {ESCAPED}")), "it ends with 'no number, [API key]'"),
    "score": (replied("200 OK", body=said(f"Score: {ESCAPED}")), "the judge's score '[API key]' is not a number"),
}


@pytest.fixture
def outcome(monkeypatch):
    """outcome(reply) -> the score of a response."""
    monkeypatch.setenv("JUDGE_KEY", KEY)

    def of(reply: bytes):
        with RawEndpoint(reply) as endpoint:
            url = f"http://localhost:{endpoint.port}/v1"  # aiohttp reads no cookies of addresses
            section = {"url": url, "model": "m", "api_key_env": "JUDGE_KEY", "pattern": r"Score: (\S+)"}
            pool = RewardPool(RewardConfig(functions=["judge"], deadline=3.0, on_error="zero", judge=section))
            try:
                pool.start()
                return asyncio.run(pool.score(PROMPT, "x"))
            finally:
                pool.close()

    return of


@pytest.mark.parametrize("place", REPLIES)
def test_a_key_that_an_endpoint_repeats_is_neither_printed_nor_kept(outcome, capfd, caplog, place):
    reply, words = REPLIES[place]
    score = outcome(reply)
    assert score.status == "reward_error" and words in score.failure
    assert "hunter22" not in score.failure + caplog.text + "".join(capfd.readouterr())


def test_nor_is_one_in_the_place_of_a_reward(serve, pool, monkeypatch):
    monkeypatch.setenv("SERVICE_KEY", KEY)
    service = serve(lambda samples, _: b'{"rewards": ["%s"]}' % ESCAPED.encode())
    score = asyncio.run(pool(service, api_key_env="SERVICE_KEY", on_error="zero").score(PROMPT, "x"))
    assert "returned '[API key]' of type str" in score.failure


def test_nor_is_one_in_an_error_of_ours(outcome, capfd, monkeypatch):
    def broken(self, reply, characters):
        raise AttributeError(f"{KEY} of {reply.decode()}")

    monkeypatch.setattr(Judge, "outcomes", broken)
    score = outcome(replied("200 OK", body=SCORED))
    printed = "".join(capfd.readouterr())
    assert "AttributeError: [API key] of" in score.failure and "AttributeError: [API key] of" in printed
    assert "hunter22" not in score.failure + printed


def test_a_key_that_no_header_can_have_is_refused(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", f"{KEY}\n")
    section = {"url": "http://127.0.0.1:9", "model": "m", "api_key_env": "JUDGE_KEY"}
    with pytest.raises(
        ValueError, match=r"^reward.judge.api_key_env: .* JUDGE_KEY has a line break or another"
    ) as error:
        RewardPool(RewardConfig(functions=["judge"], judge=section)).start()
    assert "hunter22" not in str(error.value)
