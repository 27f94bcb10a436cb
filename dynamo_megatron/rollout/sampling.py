"""Sends many requests to the fleet: each gets exactly one outcome, whatever becomes of the servers."""

from __future__ import annotations

import asyncio
import functools
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from dynamo_megatron.rollout.client import Response, ServerLost
from dynamo_megatron.rollout.dispatch import Request, Siblings
from dynamo_megatron.rollout.result import SyncNeeded
from dynamo_megatron.rollout.servers.fleet import Fleet, NoServer, Server

ATTEMPTS = 4  # a request fails once it has been lost with this many servers
Answer: TypeAlias = Callable[[Request], Awaitable[tuple[Response, str]]]


class Sampling:
    """Gets a response for each of `requests`: by `run`, or by `start` and then `wait` while the ranks do something
    else (`rollout.max_staleness`)."""

    def __init__(
        self,
        fleet: Fleet,
        requests: Sequence[Request],
        take: Callable[[Request, Response, str], Awaitable[None]],
        urgent: bool = False,
        answer: Answer | None = None,
    ):
        """`take(request, response, server)` is called once for each request as its response arrives. Requests are sent
        after all of an earlier Sampling; `urgent`: before all others. `answer`: as `ask` of `fleet`, the default."""
        self._fleet, self._take, self._answer = fleet, take, answer or functools.partial(ask, fleet)
        number, groups = fleet.next_number(urgent), defaultdict[str, Siblings](Siblings)
        self._left = dict.fromkeys(requests)  # without an outcome
        for place, request in enumerate(self._left):
            request.order, request.siblings = (number, place), groups[request.group]
            request.siblings.count += 1

    async def run(self) -> None:
        """Returns once each request has its outcome. Raises SyncNeeded where no server is left, after all responses
        that came were taken; RolloutError where no server comes up; and whatever `take` raises, at once."""
        try:
            while self._left:
                await self._fleet.wait_serving()
                async with asyncio.TaskGroup() as tasks:
                    for request in self._left:
                        tasks.create_task(self._one(request))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _one(self, request: Request) -> None:
        try:
            response, server = await self._answer(request)
        except NoServer:  # `run` waits for one, where the request's time begins anew
            request.limit = None
            return
        del self._left[request]
        await self._take(request, response, server)

    def start(self) -> None:
        self._task = asyncio.create_task(self.run())

    def go_on(self) -> None:
        """Samples the rest after a weight sync, even one that reached no server, where servers were lost."""
        if self._task.done() and isinstance(self._task.exception(), SyncNeeded):
            self.start()

    async def wait(self) -> None:
        """Waits for the end of what `start` began. Raises what `run` does."""
        await asyncio.shield(self._task)

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


async def ask(fleet: Fleet, request: Request) -> tuple[Response, str]:
    """Returns the outcome of one request, and the server that it came from. Raises NoServer where none is left."""
    while True:
        server = await fleet.acquire(request)
        try:
            response = await _outcome(fleet, request, server)
        finally:
            fleet.release(server)
        if response is not None:
            return response, server.name


async def _outcome(fleet: Fleet, request: Request, server: Server) -> Response | None:
    """Sends a request to one server. Returns None where it has to be sent again."""
    breaks = server.breaks
    try:
        response = await _response(fleet, request, server)
    except ServerLost as error:
        request.lost.append(server.name)
        server.use.retries += 1
        if not server.gone.done():
            await fleet.request_lost(server, error, breaks)
        if len(request.lost) < ATTEMPTS:
            return None
        return Response(error=f"{request.name}: lost with {', '.join(request.lost)}; the last: {error}")
    if response.finish_reason == "abort" and server.version is None and time.monotonic() < request.limit:
        request.syncs += 1  # a weight sync interrupted it: it continues under the new weights
        if response.tokens:
            request.begun = response if request.begun is None else request.begun.continued(response)
        return None
    if response.finish_reason == "error":
        if not request.refused and len(fleet.serving()) > 1:
            request.refused.append(server.name)  # it may be that server's fault: another one is tried
            return None
    else:
        server.refusals = 0
        for name in request.refused:
            fleet.refused(name, f"it refused {request.name}, which {server.name} answered")
    if response.error:
        ended = "abort" if response.finish_reason == "abort" else "error"  # also where it was cut short
        return replace(response, tokens=[], logprobs=[], weight_versions=[], finish_reason=ended, routes=None)
    return response if request.begun is None else request.begun.continued(response)


async def _response(fleet: Fleet, request: Request, server: Server) -> Response:
    """Returns one server's response. Raises ServerLost also where the server leaves the rotation meanwhile."""
    config, now = fleet.config.rollout, time.monotonic()
    request.limit = request.limit or now + config.timeout_of(request.max_new_tokens)
    attempts = len(request.lost) + len(request.refused) + request.syncs
    most, begun = request.max_new_tokens, request.begun.tokens if request.begun else []
    known = len(request.tokens) + len(begun)  # tokens whose routes are those of the weights that sampled them
    routes_from = known if begun and request.routes_from is not None else request.routes_from
    asked = asyncio.create_task(
        server.client.generate(
            f"{request.name}-{attempts}" if attempts else request.name,
            [*request.tokens, *begun],
            timeout=max(0.0, request.limit - now),
            temperature=request.temperature,
            max_new_tokens=(most or config.max_new_tokens) - len(begun) if begun else most,
            seed=request.seed,
            stop=request.stop,
            routes_from=routes_from,
        )
    )
    try:
        await asyncio.wait({asked, server.gone}, return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            raise ServerLost(f"{server.name} left the rotation: {server.gone.result()}")
        response = asked.result()
    finally:
        asked.cancel()
    server.use.tokens += len(response.tokens)
    if not response.error:
        server.heard = time.monotonic()
    if response.tokens and response.routes is None and routes_from is not None:
        fleet.returned_no_routes(server)
    return response
