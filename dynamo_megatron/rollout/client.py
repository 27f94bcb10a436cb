"""The asynchronous client of one SGLang server: token ids in, token ids and logprobs out.

Requests that are made at the same moment share an HTTP request, which costs server and client as much CPU time as a
short response does: SGLang's /generate takes lists and streams the responses over one connection, each as soon as it is
finished. A request that a list leaves unanswered is sent again alone, so that a failure concerns only the request that
caused it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import aiohttp
import numpy as np
from pydantic_core import from_json

from dynamo_megatron.config.rollout import RolloutConfig
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.rollout.servers.server_api import CONTROL_TIMEOUT, Endpoint, ServerError, call, call_for, rest
from dynamo_megatron.runtime.routes import RouteShape
from dynamo_megatron.runtime.threads import Call

CONNECT_TIMEOUT = 30.0  # seconds
ANY_TOKEN = 1 << 31  # more than any vocabulary has
KEEP_ALIVE = 2.0  # seconds: less than SGLang's 5, since a request on a connection that it is closing is lost
ROUNDING = 1e-3  # nats: a logprob may be that much above 0
CONTEXT_KEPT = 2  # tokens of its context that a server does not use
LARGEST = 256  # requests in one list: a server starts them together
ONLY_WHEN_FINISHED = 1 << 30  # tokens between two parts of a response; the first one is sent alone nevertheless
ITS_OWN_FAULT = (400, 413, 422)  # HTTP statuses about a request; any other one is about the server
MALFORMED = (AttributeError, KeyError, OverflowError, TypeError, ValueError)  # raised by a reply of an unexpected shape
T = TypeVar("T")


class ServerLost(Exception):
    """The server did not take a request, or its connection broke: another one may answer it."""


@dataclass(frozen=True)
class Response:
    """A response of R tokens. `logprobs`: float [R], natural log of softmax(z/T) at the sampling temperature.

    `weight_versions`: (version, start, end) spans over the response. `finish_reason`: "stop" (the end token, if that is
    what stopped it, is the last token), "length", or, with `error` saying why, "abort" (timed out, or ended by the
    engine, with the tokens until then where `rollout.max_staleness` is above 0) and "error" (refused by the server).
    `routes`: as `RolloutBatch.routes`, of the last tokens of the prompt that were asked for and then of the response;
    None: not asked for, or the server returned none.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weight_versions: list[tuple[int, int, int]] = field(default_factory=list)
    finish_reason: str = "error"
    error: str = ""
    routes: np.ndarray | None = field(default=None, compare=False)

    def until(self, end: int) -> Response:
        """Its first `end` tokens."""
        spans = [(version, first, min(last, end)) for version, first, last in self.weight_versions if first < end]
        known = None if self.routes is None else self.routes[: len(self.routes) + end - len(self.tokens)]
        cut = {"tokens": self.tokens[:end], "logprobs": self.logprobs[:end], "routes": known}
        return replace(self, **cut, weight_versions=spans)

    def continued(self, rest: Response) -> Response:
        """This response and then `rest`, which was sampled after it."""
        spans, start = list(self.weight_versions), len(self.tokens)
        for version, first, end in rest.weight_versions:
            if spans and spans[-1][0] == version:
                first = spans.pop()[1] - start
            spans.append((version, start + first, start + end))
        known = None if self.routes is None or rest.routes is None else np.concatenate([self.routes, rest.routes])
        joined = {"tokens": self.tokens + rest.tokens, "logprobs": self.logprobs + rest.logprobs, "routes": known}
        return replace(rest, **joined, weight_versions=spans)


def open_session() -> aiohttp.ClientSession:
    """For the clients of all servers; use as `async with`."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"Accept-Encoding": "identity"},
        auto_decompress=False,  # what is compressed nevertheless is no JSON
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT),
    )


class SGLangClient:
    """Of the server at `endpoint`. Every method is safe to run many times at once; calls of `generate` from tasks that
    start together share HTTP requests. `vocab_size`: rows of the model's embedding; a reply with other token ids is
    nonsense. `routes`: what the server can be asked for; None: nothing. `eos_token_ids` may come into the list after
    the client is made, but before its first request."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        endpoint: Endpoint,
        config: RolloutConfig,
        eos_token_ids: Sequence[int],
        vocab_size: int = ANY_TOKEN,
        routes: RouteShape | None = None,
    ):
        self.url, self._own_words, self._endpoint = endpoint.url, endpoint.own_words, endpoint
        self._session, self._config, self._vocab_size, self.routes = session, config, vocab_size, routes
        self._headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
        self._waiting: list[GenerateRequest] = []
        self._tasks: set[asyncio.Task] = set()
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
            "stop_token_ids": eos_token_ids,
        }

    async def healthy(self, timeout: float) -> bool:
        """Whether /health says 200 within `timeout` seconds. An idle server generates a token for it."""
        with contextlib.suppress(ServerError):
            await self._control(call, "/health", None, timeout)
            return True
        return False

    async def kv_cache_share(self, timeout: float) -> float:
        """Share of the server's KV cache in use, asked for `timeout` seconds. Raises RolloutError."""
        (loads,) = await self._control(call_for, "/v1/loads?include=core", None, timeout, "loads")
        try:
            return max((float(load["token_usage"]) for load in loads), default=0.0)
        except MALFORMED:
            raise RolloutError(f"the rollout server {self.url} does not tell its load: {loads!r:.80}") from None

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
        routes_from: int | None = None,
    ) -> Response:
        """One response. What goes wrong with this request alone is in the Response.

        temperature (0: greedy), max_new_tokens and timeout (seconds): None for the config's. `seed`: of the sampling,
        in [0, 2**63); SGLang uses it on a CPU and in its deterministic mode (docs/concepts.md). `stop`: texts that
        end it besides the config's. `routes_from`: the first token of the prompt whose route is asked for; None: those
        of the response are not, either. Raises ServerLost where the server is the reason.
        """
        given = {"temperature": temperature, "max_new_tokens": max_new_tokens, "sampling_seed": seed}
        sampling = self._sampling | {name: value for name, value in given.items() if value is not None}
        sampling["stop"] = [*sampling["stop"], *stop]
        if longest := max((len(text.encode()) for text in sampling["stop"]), default=0):
            # It never matches, but SGLang searches as many of the last tokens as a pattern has characters.
            sampling["stop_regex"] = [rf"[^\s\S]{{{longest}}}"]
        request = GenerateRequest(request_id, prompt_tokens, sampling, None if self.routes is None else routes_from)
        try:
            async with asyncio.timeout(self._config.timeout_of(max_new_tokens) if timeout is None else timeout):
                status, reply = await self._answered(request)
        except aiohttp.ClientError as error:  # first: no connection in time is a TimeoutError, too
            raise self._lost("does not answer", error) from error
        except ValueError as error:
            raise self._lost("answers with nonsense", error) from error
        except TimeoutError:
            with contextlib.suppress(ServerError):  # nobody waits for it any more
                await self._control(call, "/abort_request", {"rid": request.id}, CONTROL_TIMEOUT)
            return Response(finish_reason="abort", error=f"no response to {request_id} within rollout.timeout")
        if status in ITS_OWN_FAULT:
            return Response(error=f"{request_id}: the server refused it: {self._own_words(reply)}")
        if status != 200:
            raise self._lost(f"answers with {status}", reply)
        try:
            return self._response(request, reply["meta_info"])
        except MALFORMED as error:
            what = str(error) if isinstance(error, ValueError) else repr(error)
            raise self._lost("answers with nonsense", what, "; does it serve model.path?") from error

    async def parse_tool_calls(self, text: str, tools: Sequence[Any], parser: str) -> Any:
        """{"normal_text", "calls": [{"name", "parameters"}]} of an answer, by a parser of SGLang. Raises
        RolloutError."""
        payload = {"text": text, "tools": list(tools), "tool_call_parser": parser}
        return await self._control(call, "/parse_function_call", payload, CONTROL_TIMEOUT)

    async def freeze_gc(self) -> None:
        """Exempts what the server has allocated so far from its garbage collections.

        A CPU server runs a full collection for every /flush_cache: 0.4 s over the modules it has imported. SGLang makes
        this call itself, but with --skip-server-warmup before its port listens.
        """
        with contextlib.suppress(ServerError):
            await self._control(call, "/freeze_gc", {}, CONTROL_TIMEOUT)

    async def abort_all(self) -> None:
        """Ends all requests under way. Raises RolloutError."""
        await self._control(call, "/abort_request", {"abort_all": True}, CONTROL_TIMEOUT)

    async def rest(self) -> None:
        """Ends all requests under way and drops cached prefixes. Raises RolloutError."""
        await self._control(rest)

    async def _control(self, function: Callable[..., T], *arguments: Any) -> T:
        """The result of a function of server_api.py for this server. It runs in a thread of its own."""
        return await asyncio.shield(asyncio.wrap_future(Call(function, self._endpoint, *arguments)))

    def _lost(self, what: str, said: Any, hint: str = "") -> ServerLost:
        return ServerLost(f"the rollout server {self.url} {what}: {self._own_words(said)}{hint}")

    def _post(self, payload: dict[str, Any]) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self._session.post(f"{self.url}/generate", json=payload, headers=self._headers, allow_redirects=False)

    def _response(self, request: GenerateRequest, meta: dict[str, Any]) -> Response:
        """Raises one of MALFORMED for what is no response to `request`."""
        finish = meta["finish_reason"]
        matched = finish.get("matched")
        if meta["id"] != request.id:
            raise ValueError(f"a response to {self._own_words(meta['id'])!r}, {request.id!r} was asked for")
        if finish["type"] == "abort":
            why = f"{request.name}: the engine aborted it: {self._own_words(finish['message'])}"
            if not self._config.max_staleness or not meta.get("output_token_logprobs"):
                return Response(finish_reason="abort", error=why)
            return self._until_aborted(request, self._sampled(request, meta, "length"), why)
        if isinstance(matched, str) and matched not in request.sampling["stop"]:
            # The engine ends a sequence whose logits are NaN like one that met a stop text.
            return Response(error=f"{request.name}: the engine stopped it: {self._own_words(matched)}")
        response = self._sampled(request, meta, finish["type"])
        end = matched[-1] if isinstance(matched, list) and matched else matched  # some ends are several tokens
        length, most = len(response.tokens), request.sampling["max_new_tokens"]
        if finish["type"] == "length" and length + CONTEXT_KEPT < most:
            return Response(
                finish_reason="length",  # no refusal: another server would sample all of it again
                error=f"{request.name}: the server ended it after {length} of {most} tokens: its KV cache, or its "
                "--context-length, holds no longer sequence; raise rollout.memory_fraction or rollout.tp (without a "
                "GPU set model.max_length)",
            )
        if finish["type"] == "stop" and isinstance(end, int) and end != response.tokens[-1]:
            raise ValueError(f"stopped by {self._own_words(matched)}, which the last token is not")
        return response

    def _until_aborted(self, request: GenerateRequest, response: Response, why: str) -> Response:
        """The engine samples one more token before it aborts, several where it speculates, without a check whether one
        of them ends the response."""
        ends = set(self._sampling["stop_token_ids"])
        if (end := next((i for i, token in enumerate(response.tokens, 1) if token in ends), None)) is not None:
            return replace(response.until(end), finish_reason="stop")
        if len(response.tokens) == request.sampling["max_new_tokens"]:
            return response
        return replace(response, finish_reason="abort", error=why)

    def _sampled(self, request: GenerateRequest, meta: dict[str, Any], finish_reason: str) -> Response:
        """Raises as `_response`."""
        spans, most = meta["weight_versions"], request.sampling["max_new_tokens"]
        tokens = [token for _, token, _ in meta["output_token_logprobs"]]
        logprobs = [logprob for logprob, _, _ in meta["output_token_logprobs"]]
        versions = [(_version(span["version"]), span["start"], span["end"]) for span in spans]
        if not 1 <= len(tokens) <= most:
            raise ValueError(f"{len(tokens)} tokens, 1 to {most} were asked for")
        wrong = min(tokens) if min(tokens) < 0 else max(tokens)
        if not 0 <= wrong < self._vocab_size:
            raise ValueError(f"token id {wrong} is not in the vocabulary (0 to {self._vocab_size - 1})")
        if not all(-math.inf < logprob <= ROUNDING for logprob in logprobs):
            raise ValueError("a logprob that is not finite, or above 0")
        starts, ends = [start for _, start, _ in versions], [end for _, _, end in versions]
        if [*starts, len(tokens)] != [0, *ends] or ends != sorted(ends):
            raise ValueError(f"{len(tokens)} tokens, and weight versions of {versions}")
        if finish_reason not in ("stop", "length"):
            raise ValueError(f"finish_reason {finish_reason!r}")
        return Response(tokens, logprobs, versions, finish_reason, routes=self._routes(request, meta, len(tokens)))

    def _routes(self, request: GenerateRequest, meta: dict[str, Any], response: int) -> np.ndarray | None:
        """The routes that were asked for, of which SGLang names that of a token after the token itself. `response`:
        tokens of it. Raises ValueError."""
        first, text = request.routes_from, meta.get("routed_experts")
        if first is None:
            return None
        whole = len(request.tokens) + response
        if text is None:  # SGLang names none of what it has retracted, once that is aborted
            return self.routes.unknown(whole - first) if meta["finish_reason"]["type"] == "abort" else None
        layers, topk, experts = self.routes
        found = np.frombuffer(base64.b64decode(text), np.int32)
        expected = whole - 1 - request.routes_start
        if found.size != expected * layers * topk:
            raise ValueError(f"{found.size} routed experts, {expected * layers * topk} were expected")
        if found.min(initial=0) < 0 or found.max(initial=0) >= experts:
            raise ValueError(f"routed experts from {found.min()} to {found.max()}, and there are {experts}")
        if not found.any():  # its kernel routes by itself and names none, as flashinfer_trtllm does
            return None
        known = found.astype(self.routes.dtype).reshape(expected, layers, topk)
        known = known[max(first, 1) - 1 - request.routes_start :]
        return np.concatenate([self.routes.unknown(whole - first - len(known)), known])  # unknown: of the first token

    async def _answered(self, request: GenerateRequest) -> tuple[int, Any]:
        """Returns the HTTP status and body of one request. Raises aiohttp.ClientError where the server does not answer,
        ValueError where the answer is malformed JSON. Once all requests of a list are cancelled, their
        connection is closed."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._send)  # after all tasks that are ready to run
        self._waiting.append(request)
        return await request.reply

    def _send(self) -> None:
        waiting = [request for request in self._waiting if not request.reply.done()]
        self._waiting = []
        for start in range(0, len(waiting), LARGEST):
            self._start(waiting[start : start + LARGEST])

    def _start(self, requests: list[GenerateRequest]) -> None:
        task = asyncio.create_task(self._one(requests[0]) if len(requests) == 1 else self._list(requests))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

        def abandoned(reply: asyncio.Future) -> None:
            if reply.cancelled() and all(request.reply.done() for request in requests):
                task.cancel()

        for request in requests:
            request.reply.add_done_callback(abandoned)

    async def _one(self, request: GenerateRequest) -> None:
        payload = {
            "rid": request.id,
            "input_ids": list(request.tokens),
            "return_logprob": True,
            "sampling_params": request.sampling,
            **_ask_for_routes([request]),
        }
        try:
            async with self._post(payload) as reply:
                answer = reply.status, await body(reply)
        except Exception as error:  # `generate` raises it
            if not request.reply.done():
                request.reply.set_exception(error)
            return
        if not request.reply.done():
            request.reply.set_result(answer)

    async def _list(self, requests: list[GenerateRequest]) -> None:
        """Sends the requests as one list and answers each as its response comes. Those that get no answer, whatever
        went wrong, are sent again alone."""
        left = {request.id: request for request in requests}
        payload = {
            "rid": list(left),
            "input_ids": [list(request.tokens) for request in requests],
            "return_logprob": True,
            "sampling_params": [r.sampling | {"stream_interval": ONLY_WHEN_FINISHED} for r in requests],
            "stream": True,
            **_ask_for_routes(requests),
        }
        begun = True  # SGLang may have started them, and abort them by their ids later
        with contextlib.suppress(aiohttp.ClientError, *MALFORMED):
            async with self._post(payload) as reply:
                if begun := reply.status == 200:
                    async for event in _events(reply):
                        _answer(left, event)
        for request in left.values():
            if not request.reply.done():
                request.id = f"alone-{request.id}" if begun else request.id
                self._start([request])


def _version(text: str) -> int:
    """-1 for what somebody else's server calls its weights."""
    return int(text) if text.isdecimal() else -1


@dataclass(eq=False)
class GenerateRequest:
    """`id` is the server's name for the request and changes when the request is sent again. SGLang aborts all requests
    whose id begins with the id in an abort; since every id ends with ";", which `name` does not contain, no id begins
    with another. Create a GenerateRequest in a running event loop."""

    name: str
    tokens: Sequence[int]
    sampling: dict[str, Any]
    routes_from: int | None = None  # as in `SGLangClient.generate`
    routes_start: int = 0  # the first token after which the server names a route
    reply: asyncio.Future = field(default_factory=lambda: asyncio.get_running_loop().create_future())  # status, body

    def __post_init__(self) -> None:
        self.id = f"{self.name};"


def _ask_for_routes(requests: Sequence[GenerateRequest]) -> dict[str, Any]:
    """Sets `routes_start` and returns what asks for the routes. SGLang has one first token for all requests of a list,
    and refuses those with a shorter prompt, whether anybody wants their routes or not."""
    if all(request.routes_from is None for request in requests):
        return {}
    start = min(len(r.tokens) if r.routes_from is None else max(0, r.routes_from - 1) for r in requests)
    for request in requests:
        request.routes_start = start
    return {"return_routed_experts": True, "routed_experts_start_len": start}


def _answer(left: dict[str, GenerateRequest], event: dict[str, Any]) -> None:
    """Removes the request that a finished response answers from `left`. Raises one of MALFORMED."""
    meta = event["meta_info"]
    if (finish := meta["finish_reason"]) is None:
        return
    future = left.pop(meta["id"]).reply
    if not future.done():
        # SGLang would have answered with this status if the request had been sent alone.
        status = finish.get("status_code") if finish["type"] == "abort" else None
        future.set_result((200, event) if status is None else (int(status), finish))


async def body(reply: aiohttp.ClientResponse) -> Any:
    """Returns the body of the reply: parsed if its content type is JSON, else as text. Raises ValueError where it
    should be JSON and is not."""
    raw = await reply.read()
    if reply.content_type != "application/json":
        return raw.decode(errors="replace")
    return from_json(raw)  # a quarter of json's time


async def _events(reply: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    """Yields the JSON of server-sent events, which can be longer than the lines that aiohttp reads. Raises
    ValueError."""
    read, searched = bytearray(), 0
    async for chunk in reply.content.iter_any():
        read += chunk
        while (end := read.find(b"\n\n", searched)) >= 0:
            event = bytes(read[:end])
            del read[: end + 2]
            searched = 0
            if event.startswith(b"data: {"):
                yield from_json(event[6:])
        searched = max(0, len(read) - 1)
