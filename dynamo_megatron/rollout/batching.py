"""Requests to one server that are made at the same moment share an HTTP request.

SGLang's /generate takes lists and streams the responses over one connection, each as soon as it is finished. An HTTP
request costs server and client as much CPU time as a short response does. What a list does not answer is sent again as
a request of its own, whose failure is then its own, too.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import aiohttp
from pydantic_core import from_json

LARGEST = 256  # requests in one: a server starts them together
ONLY_WHEN_FINISHED = 1 << 30  # tokens between two parts of a response; the first one is sent alone nevertheless
ITS_OWN_FAULT = (400, 413, 422)  # HTTP statuses about a request; any other one is about the server
MALFORMED = (AttributeError, KeyError, TypeError, ValueError)  # what a reply of another shape runs into

Post = Callable[[str, dict[str, Any]], AbstractAsyncContextManager[aiohttp.ClientResponse]]


@dataclass(eq=False)
class _Request:
    id: str
    tokens: Sequence[int]
    sampling: dict[str, Any]
    reply: asyncio.Future  # HTTP status and body


class Batches:
    """The /generate of one server. `post(path, payload)` opens an HTTP request to it."""

    def __init__(self, post: Post):
        self._post = post
        self._waiting: list[_Request] = []
        self._tasks: set[asyncio.Task] = set()
        self._takes_lists = True  # until it refuses one: another version of SGLang, or a request at fault

    async def generate(self, request_id: str, tokens: Sequence[int], sampling: dict[str, Any]) -> tuple[int, Any]:
        """HTTP status and body of one request. Raises aiohttp.ClientError where the server does not answer, ValueError
        where it does not answer with JSON. Once all requests of a list are cancelled their connection is closed."""
        loop = asyncio.get_running_loop()
        request = _Request(request_id, tokens, sampling, loop.create_future())
        if not self._waiting:
            loop.call_soon(self._send)  # once all tasks that are ready to run have asked, too
        self._waiting.append(request)
        return await request.reply

    def _send(self) -> None:
        waiting = [request for request in self._waiting if not request.reply.done()]
        self._waiting = []
        size = LARGEST if self._takes_lists else 1
        for start in range(0, len(waiting), size):
            self._start(waiting[start : start + size])

    def _start(self, requests: list[_Request]) -> None:
        task = asyncio.create_task(self._carry_out(requests))
        self._tasks.add(task)

        def ended(task: asyncio.Task) -> None:
            self._tasks.discard(task)
            error = None if task.cancelled() else task.exception()
            for request in requests:
                if error is not None and not request.reply.done():
                    request.reply.set_exception(error)

        def abandoned(reply: asyncio.Future) -> None:
            if reply.cancelled() and all(request.reply.done() for request in requests):
                task.cancel()

        task.add_done_callback(ended)
        for request in requests:
            request.reply.add_done_callback(abandoned)

    async def _carry_out(self, requests: list[_Request]) -> None:
        if len(requests) == 1:
            await self._one(requests[0])
            return
        await self._list(requests)
        for request in requests:
            if not request.reply.done():
                self._start([request])

    async def _one(self, request: _Request) -> None:
        payload = {
            "rid": request.id,
            "input_ids": list(request.tokens),
            "return_logprob": True,
            "sampling_params": request.sampling,
        }
        async with self._post("/generate", payload) as reply:
            answer = reply.status, await body(reply)
        if not request.reply.done():
            request.reply.set_result(answer)

    async def _list(self, requests: list[_Request]) -> None:
        """Answers each as its response comes. Whatever goes wrong, the others are left without an answer."""
        left = {request.id: request for request in requests}
        payload = {
            "rid": list(left),
            "input_ids": [list(request.tokens) for request in requests],
            "return_logprob": True,
            "sampling_params": [r.sampling | {"stream_interval": ONLY_WHEN_FINISHED} for r in requests],
            "stream": True,
        }
        with contextlib.suppress(aiohttp.ClientError, *MALFORMED):
            async with self._post("/generate", payload) as reply:
                if reply.status != 200:
                    self._takes_lists = reply.status not in ITS_OWN_FAULT
                    return
                for request in requests:
                    request.id += "-alone"  # where it is asked again: SGLang may abort what is left of a list later
                async for event in _events(reply):
                    if "error" in event:  # in one of the requests; none has been begun
                        self._takes_lists = False
                        return
                    finish = event["meta_info"]["finish_reason"]
                    if finish is None:
                        continue
                    future = left.pop(event["meta_info"]["id"]).reply
                    if not future.done():
                        # To a request of its own SGLang would have answered with this status.
                        refused = finish.get("status_code") if finish["type"] == "abort" else None
                        future.set_result((200, event) if refused is None else (int(refused), finish))


async def body(reply: aiohttp.ClientResponse) -> Any:
    if reply.content_type != "application/json":
        return await reply.text()
    return from_json(await reply.read())  # a quarter of json's time


async def _events(reply: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    """The JSON of server-sent events, which are longer than aiohttp's lines may be."""
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
