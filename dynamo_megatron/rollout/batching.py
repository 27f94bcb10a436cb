"""Requests to one server that are made at the same moment share an HTTP request.

SGLang's /generate takes lists and streams the responses over one connection, each as soon as it is finished. An HTTP
request costs server and client as much CPU time as a short response does. A request that a list leaves unanswered is
sent again alone, so that a failure concerns only the request that caused it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from pydantic_core import from_json

LARGEST = 256  # requests in one list: a server starts them together
SMALLEST_LIMIT = 1 << 20  # bytes of a reply that has no tokens
BYTES_A_TOKEN = 1024  # more for each token of a reply: a logprob and id take 50, the text in JSON at most some hundreds
ONLY_WHEN_FINISHED = 1 << 30  # tokens between two parts of a response; the first one is sent alone nevertheless
ITS_OWN_FAULT = (400, 413, 422)  # HTTP statuses about a request; any other one is about the server
MALFORMED = (AttributeError, KeyError, OverflowError, TypeError, ValueError)  # raised by a reply of an unexpected shape


class MalformedReply(ValueError):
    """A server's reply is not what was requested."""


Post = Callable[[str, dict[str, Any]], AbstractAsyncContextManager[aiohttp.ClientResponse]]


@dataclass(eq=False)
class Request:
    """`id` is the server's name for the request and changes when the request is sent again. SGLang aborts all requests
    whose id begins with the id in an abort; since every id ends with ";", which `name` does not contain, no id begins
    with another. Create a Request in a running event loop."""

    name: str
    tokens: Sequence[int]
    sampling: dict[str, Any]
    reply: asyncio.Future = field(default_factory=lambda: asyncio.get_running_loop().create_future())  # status, body

    def __post_init__(self) -> None:
        self.id = f"{self.name};"

    @property
    def largest_reply(self) -> int:
        """The size of the largest valid reply, in bytes."""
        return SMALLEST_LIMIT + BYTES_A_TOKEN * self.sampling["max_new_tokens"]


class Batches:
    """The /generate of one server. `post(path, payload)` opens an HTTP request to it."""

    def __init__(self, post: Post):
        self._post = post
        self._waiting: list[Request] = []
        self._tasks: set[asyncio.Task] = set()

    async def generate(self, request: Request) -> tuple[int, Any]:
        """Returns the HTTP status and body of one request. Raises aiohttp.ClientError where the server does not answer,
        ValueError where the answer is too long or is malformed JSON. Once all requests of a list are cancelled, their
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

    def _start(self, requests: list[Request]) -> None:
        task = asyncio.create_task(self._one(requests[0]) if len(requests) == 1 else self._list(requests))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

        def abandoned(reply: asyncio.Future) -> None:
            if reply.cancelled() and all(request.reply.done() for request in requests):
                task.cancel()

        for request in requests:
            request.reply.add_done_callback(abandoned)

    async def _one(self, request: Request) -> None:
        payload = {
            "rid": request.id,
            "input_ids": list(request.tokens),
            "return_logprob": True,
            "sampling_params": request.sampling,
        }
        try:
            async with self._post("/generate", payload) as reply:
                answer = reply.status, await body(reply, request.largest_reply)
        except Exception as error:  # `generate` raises it
            if not request.reply.done():
                request.reply.set_exception(error)
            return
        if not request.reply.done():
            request.reply.set_result(answer)

    async def _list(self, requests: list[Request]) -> None:
        """Sends the requests as one list and answers each as its response comes. Those that get no answer, whatever
        went wrong, are sent again alone."""
        left = {request.id: request for request in requests}
        payload = {
            "rid": list(left),
            "input_ids": [list(request.tokens) for request in requests],
            "return_logprob": True,
            "sampling_params": [r.sampling | {"stream_interval": ONLY_WHEN_FINISHED} for r in requests],
            "stream": True,
        }
        largest = max(request.largest_reply for request in requests)
        begun = True  # SGLang may have started them, and abort them by their ids later
        with contextlib.suppress(aiohttp.ClientError, *MALFORMED):
            async with self._post("/generate", payload) as reply:
                begun = reply.status == 200
                if begun:
                    async for event in _events(reply, largest):
                        _answer(left, event)
        for request in left.values():
            if not request.reply.done():
                request.id = f"alone-{request.id}" if begun else request.id
                self._start([request])


def _answer(left: dict[str, Request], event: dict[str, Any]) -> None:
    """Removes the request that a finished response answers from `left`. Raises one of MALFORMED."""
    meta = event["meta_info"]
    if (finish := meta["finish_reason"]) is None:
        return
    future = left.pop(meta["id"]).reply
    if not future.done():
        # SGLang would have answered with this status if the request had been sent alone.
        status = finish.get("status_code") if finish["type"] == "abort" else None
        future.set_result((200, event) if status is None else (int(status), finish))


async def body(reply: aiohttp.ClientResponse, largest: int) -> Any:
    """Returns the body of the reply: parsed if its content type is JSON, else as text. Raises MalformedReply where it
    has more than `largest` bytes, ValueError where it should be JSON and is not."""
    raw = bytearray()
    async for chunk in reply.content.iter_any():
        raw += chunk
        if len(raw) > largest:
            raise MalformedReply(f"a reply of more than {largest} bytes")
    if reply.content_type != "application/json":
        return raw.decode(errors="replace")
    return from_json(raw)  # a quarter of json's time


async def _events(reply: aiohttp.ClientResponse, largest: int) -> AsyncIterator[Any]:
    """Yields the JSON of server-sent events, which can be longer than the lines that aiohttp reads. Raises ValueError
    as `body` does; `largest`: bytes of one event."""
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
        if len(read) > largest:
            raise MalformedReply(f"an event of more than {largest} bytes")
