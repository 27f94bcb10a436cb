"""The asynchronous client of one SGLang server: token ids in, token ids and logprobs out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
from pydantic_core import from_json

from dynamo_megatron.config.rollout import RolloutConfig
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.rollout.servers.endpoint import Endpoint
from dynamo_megatron.rollout.validation import response_fault

CONTROL_TIMEOUT = 30.0  # seconds, for calls that do no work to speak of
ANY_TOKEN = 1 << 31  # more than any vocabulary has
KEEP_ALIVE = 2.0  # seconds: less than SGLang's 5, since a request on a connection that it is closing is lost
SMALLEST_LIMIT = 1 << 20  # bytes of a reply that has no tokens
BYTES_A_TOKEN = 1024  # more for each token of a reply: a logprob and id take 50, the text in JSON at most some hundreds
ITS_OWN_FAULT = (400, 413, 422)  # HTTP statuses about a request; any other one is about the server
MALFORMED = (AttributeError, KeyError, OverflowError, TypeError, ValueError)  # raised by a reply of an unexpected shape


class ServerLost(Exception):
    """The server did not take a request, or its connection broke: another one may answer it."""


class ConnectionLost(ServerLost):
    """There was no reply, or none to its end."""


@dataclass(frozen=True)
class Response:
    """A response of R tokens. `logprobs`: float [R], natural log of softmax(z/T) at the sampling temperature.

    `weight_versions`: (version, start, end) spans over the response. `finish_reason`: "stop" (the end token, if that is
    what stopped it, is the last token), "length", or, with `error` saying why, "abort" (timed out, or ended by the
    engine, with the tokens until then where `rollout.max_staleness` is above 0) and "error" (refused by the server).
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weight_versions: list[tuple[int, int, int]] = field(default_factory=list)
    finish_reason: str = "error"
    error: str = ""

    def continued(self, rest: Response) -> Response:
        """This response and then `rest`, which was sampled after it."""
        spans, start = list(self.weight_versions), len(self.tokens)
        for version, first, end in rest.weight_versions:
            if spans and spans[-1][0] == version:
                first = spans.pop()[1] - start
            spans.append((version, start + first, start + end))
        return replace(
            rest, tokens=self.tokens + rest.tokens, logprobs=self.logprobs + rest.logprobs, weight_versions=spans
        )


def open_session() -> aiohttp.ClientSession:
    """For the clients of all servers; use as `async with`."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"Accept-Encoding": "identity"},
        auto_decompress=False,  # what is compressed nevertheless is no JSON
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONTROL_TIMEOUT),
    )


class SGLangClient:
    """Of the server at `endpoint`. Every method is safe to run many times at once. `vocab_size`: rows of the model's
    embedding; a reply with other token ids is nonsense."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        endpoint: Endpoint,
        config: RolloutConfig,
        eos_token_ids: Sequence[int],
        vocab_size: int = ANY_TOKEN,
    ):
        self.url, self._own_words = endpoint.url, endpoint.own_words
        self._session, self._config, self._vocab_size = session, config, vocab_size
        self._headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
        # Everything that reshapes the distribution is said here, so that no default of server or model can.
        self._sampling = {
            "temperature": config.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "max_new_tokens": config.max_new_tokens,
            "stop": list(config.stop),
            "stop_token_ids": list(eos_token_ids),
        }

    async def model_info(self) -> dict[str, Any]:
        """What the server says of itself. Raises RolloutError where no SGLang server answers at `url`."""
        status, reply = await self._control("GET", "/model_info", CONTROL_TIMEOUT)
        if status != 200 or not isinstance(reply, dict):
            raise RolloutError(
                f"{self.url} is no SGLang server: /model_info says {status} {self._own_words(reply)!r:.80}"
            )
        return reply

    async def healthy(self, timeout: float) -> bool:
        """Whether /health says 200 within `timeout` seconds; infinity: the caller ends the wait. An idle server
        generates a token for it."""
        try:
            return (await self._control("GET", "/health", timeout))[0] == 200
        except RolloutError:
            return False

    async def kv_cache_share(self, timeout: float) -> float:
        """Share of the server's KV cache in use, asked for `timeout` seconds. Raises RolloutError."""
        status, reply = await self._control("GET", "/v1/loads?include=core", timeout)
        try:
            share = max((float(load["token_usage"]) for load in reply["loads"]), default=0.0)
            if not 0 <= share <= 1:
                raise ValueError(f"token_usage {share}")
            return share
        except MALFORMED:
            raise RolloutError(
                f"the rollout server {self.url} does not tell its load: {status} {self._own_words(reply)}"
            ) from None

    async def generate(
        self,
        request_id: str,
        prompt_tokens: Sequence[int],
        *,
        timeout: float | None = None,
        temperature: float | None = None,
        max_new_tokens: int | None = None,
        seed: int | None = None,
        stop: Sequence[str] = (),
    ) -> Response:
        """One response. What goes wrong with this request alone is in the Response.

        temperature (0: greedy), max_new_tokens and timeout (seconds): None for the config's. `seed`: of the sampling,
        in [0, 2**63); SGLang uses it on a CPU and in its deterministic mode (docs/concepts.md). `stop`: texts that
        end it besides the config's. Raises ServerLost where the server is the reason.
        """
        sampling = dict(self._sampling)
        if temperature is not None:
            sampling["temperature"] = temperature
        if max_new_tokens is not None:
            sampling["max_new_tokens"] = max_new_tokens
        if seed is not None:
            sampling["sampling_seed"] = seed
        if stop:
            sampling["stop"] = [*sampling["stop"], *stop]
        # SGLang aborts all requests whose id begins with the id in an abort. Every id ends with ";", which no name has,
        # so that no id begins with another.
        rid, most, limit = f"{request_id};", sampling["max_new_tokens"], self._config.timeout_of(max_new_tokens)
        payload = {
            "rid": rid,
            "input_ids": list(prompt_tokens),
            "return_logprob": True,
            "sampling_params": sampling,
        }
        try:
            async with asyncio.timeout(limit if timeout is None else timeout):
                status, reply = await self._request("POST", "/generate", payload, SMALLEST_LIMIT + BYTES_A_TOKEN * most)
        except aiohttp.ClientError as error:  # first: no connection in time is a TimeoutError, too
            raise ConnectionLost(f"the rollout server {self.url} does not answer: {self._own_words(error)}") from error
        except ValueError as error:
            raise ServerLost(
                f"the rollout server {self.url} answers with nonsense: {self._own_words(error)}"
            ) from error
        except TimeoutError:
            await self._abort(rid)
            return Response(
                finish_reason="abort",
                error=f"no response to {request_id} within rollout.timeout ({limit:g} s)",
            )
        if status in ITS_OWN_FAULT:
            return Response(error=f"{request_id}: the server refused it: {self._own_words(reply)}")
        if status != 200:
            raise ServerLost(f"the rollout server {self.url} answers with {status}: {self._own_words(reply)}")
        try:
            return self._response(rid, sampling, reply["meta_info"])
        except MALFORMED as error:
            what = str(error) if isinstance(error, ValueError) else repr(error)
            why = f"answers with nonsense: {self._own_words(what)}; does it serve model.path?"
            raise ServerLost(f"the rollout server {self.url} {why}") from error

    async def parse_tool_calls(self, text: str, tools: Sequence[Any], parser: str) -> Any:
        """{"normal_text", "calls": [{"name", "parameters"}]} of an answer, by a parser of SGLang. Raises
        RolloutError."""
        payload = {"text": text, "tools": list(tools), "tool_call_parser": parser}
        status, reply = await self._control("POST", "/parse_function_call", CONTROL_TIMEOUT, payload)
        if status != 200 or not isinstance(reply, dict) or not isinstance(reply.get("calls"), list):
            raise RolloutError(f"the rollout server {self.url} parses no tool calls: {status} {self._own_words(reply)}")
        return reply

    async def classify(self, tokens: Sequence[int], timeout: float) -> Any:
        """What a server of a classifier says of one input, within `timeout` seconds. Raises RolloutError."""
        status, reply = await self._control("POST", "/classify", timeout, {"input_ids": [list(tokens)]})
        if status != 200:
            raise RolloutError(f"the server {self.url} gives no scores: {status} {self._own_words(reply)}")
        return reply

    async def freeze_gc(self) -> None:
        """Exempts what the server has allocated so far from its garbage collections. Raises RolloutError.

        A CPU server runs a full collection for every /flush_cache: 0.4 s over the modules it has imported. SGLang makes
        this call itself, but with --skip-server-warmup before its port listens. Servers without it answer 404.
        """
        await self._control("POST", "/freeze_gc", CONTROL_TIMEOUT)

    async def abort_all(self) -> None:
        """Ends all requests under way. Raises RolloutError."""
        await self._control("POST", "/abort_request", CONTROL_TIMEOUT, {"abort_all": True})

    async def rest(self) -> None:
        """Ends all requests under way and drops cached prefixes. Raises RolloutError."""
        await self.abort_all()
        status, reply = await self._control("POST", f"/flush_cache?timeout={CONTROL_TIMEOUT:g}", 2 * CONTROL_TIMEOUT)
        if status != 200:
            raise RolloutError(f"the rollout server {self.url} cannot come to rest: {status} {self._own_words(reply)}")

    async def _abort(self, rid: str) -> None:
        """Ends a request that nobody waits for any more."""
        with contextlib.suppress(RolloutError):
            await self._control("POST", "/abort_request", CONTROL_TIMEOUT, {"rid": rid})

    async def _control(self, method: str, path: str, timeout: float, payload: dict | None = None) -> tuple[int, Any]:
        try:
            async with asyncio.timeout(timeout):
                return await self._request(method, path, payload)
        except (aiohttp.ClientError, ValueError) as error:
            raise RolloutError(
                f"the rollout server {self.url} does not answer {path}: {self._own_words(error)}"
            ) from error
        except TimeoutError:
            raise RolloutError(f"the rollout server {self.url} did not answer {path} within {timeout:g} s") from None

    async def _request(
        self, method: str, path: str, payload: dict | None = None, largest: int = SMALLEST_LIMIT
    ) -> tuple[int, Any]:
        """Returns the HTTP status and the body: parsed if its content type is JSON, else as text. Raises
        aiohttp.ClientError where the server does not answer, ValueError where the body has more than `largest` bytes,
        or should be JSON and is not."""
        raw = bytearray()
        async with self._session.request(
            method, self.url + path, json=payload, headers=self._headers, allow_redirects=False
        ) as reply:
            async for chunk in reply.content.iter_any():
                raw += chunk
                if len(raw) > largest:
                    raise ValueError(f"a reply of more than {largest} bytes")
        if reply.content_type != "application/json":
            return reply.status, raw.decode(errors="replace")
        return reply.status, from_json(raw)  # a quarter of json's time

    def _response(self, rid: str, sampling: dict[str, Any], meta: dict[str, Any]) -> Response:
        """Raises one of MALFORMED for what is no response to the request `rid`."""
        if meta["id"] != rid:
            raise ValueError(f"a response to {self._own_words(meta['id'])!r}, {rid!r} was asked for")
        name, most, error = rid.removesuffix(";"), sampling["max_new_tokens"], ""
        finish, sampled = meta["finish_reason"], meta.get("output_token_logprobs")
        kind, matched = finish["type"], finish.get("matched")
        if isinstance(matched, str) and matched not in sampling["stop"]:
            # The engine ends a sequence whose logits are NaN like one that met a stop text.
            return Response(error=f"{name}: the engine stopped it: {self._own_words(matched)}")
        if kind == "abort":
            error = f"{name}: the engine aborted it: {self._own_words(finish['message'])}"
            if not self._config.max_staleness or not sampled:
                return Response(finish_reason="abort", error=error)
        tokens, logprobs = [token for _, token, _ in sampled], [logprob for logprob, _, _ in sampled]
        spans = [(_version(span["version"]), span["start"], span["end"]) for span in meta["weight_versions"]]
        parts = tokens, logprobs, spans, "length" if error else kind
        if fault := response_fault(*parts, vocab_size=self._vocab_size, max_new_tokens=most):
            raise ValueError(fault)
        end = matched[-1] if isinstance(matched, list) and matched else matched  # some ends are several tokens
        if kind == "stop" and isinstance(end, int) and end != tokens[-1]:
            raise ValueError(f"stopped by {self._own_words(matched)}, which the last token is not")
        # The engine samples one more token before it aborts, without a check whether this token ends the response.
        if error and tokens[-1] in self._sampling["stop_token_ids"]:
            return Response(tokens, logprobs, spans, "stop")
        if error and len(tokens) < most:
            return Response(tokens, logprobs, spans, "abort", error)
        return Response(*parts)


def _version(text: str) -> int:
    """-1 for what somebody else's server calls its weights."""
    return int(text) if text.isdecimal() else -1
