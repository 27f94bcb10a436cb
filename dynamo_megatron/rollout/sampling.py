"""Sends many requests to the fleet: each gets exactly one outcome, whatever becomes of the servers."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from dynamo_megatron.rollout.client import Response, ServerLost
from dynamo_megatron.rollout.dispatch import choose_server, dispatch_order
from dynamo_megatron.rollout.servers.fleet import Fleet, Server
from dynamo_megatron.types import Prompt

ATTEMPTS = 4  # a request fails once it has been lost with this many servers


@dataclass(eq=False)
class Request:
    """`expected`: expected tokens of the response. `seed`: as in `SGLangClient.generate`; the same for every server and
    every attempt. `temperature` and `max_new_tokens`: None for the config's. `stop`: in addition to the config's. The
    fields below `stop` are the state of the request."""

    name: str
    group: str
    prompt: Prompt
    tokens: Sequence[int]  # that the model is given
    expected: float
    seed: int | None = None
    temperature: float | None = None
    max_new_tokens: int | None = None
    stop: Sequence[str] = ()
    lost: list[str] = field(default_factory=list)  # servers that it was lost with
    refused: list[str] = field(default_factory=list)  # servers that refused it
    limit: float | None = None  # monotonic seconds: when it is aborted; set when first sent
    begun: Response | None = None  # the part of the response that older weights sampled
    syncs: int = 0  # weight syncs that interrupted it
    task: asyncio.Task | None = None  # waits for a server's response


class Sampling:
    """Gets a response from `fleet` for each of `requests`."""

    def __init__(
        self,
        fleet: Fleet,
        requests: Sequence[Request],
        take: Callable[[Request, Response, str], Awaitable[None]],
        after: Sequence[Sampling] = (),
        urgent: bool = False,
        stays_open: bool = False,
    ):
        """`take(request, response, server)` is called once for each request as its response arrives. `after`: sends
        nothing while one of these still has requests to send. `urgent`: sends its requests before all others when a
        server can take one. `stays_open`: `run` goes on until `close`, since requests are added meanwhile."""
        self._fleet, self._take = fleet, take
        self._config = fleet.config.rollout
        self._after, self._urgent, self._open = after, urgent, stays_open
        order = dispatch_order([r.group for r in requests], [r.expected for r in requests])
        self._pending = deque(requests[i] for i in order)
        self._group_tokens: dict[str, float] = defaultdict(float)
        for request in requests:
            self._group_tokens[request.group] += request.expected
        self._home: dict[str, str] = {}  # group -> the server that it is on
        self._under_way = 0
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Returns once each request has its outcome. Raises SyncNeeded where no server is left, after all responses
        that came were taken; RolloutError where no server comes up; and whatever `take` raises, at once."""
        self._fleet.listeners.insert(0 if self._urgent else len(self._fleet.listeners), self._wake.set)
        try:
            while self._pending or self._open:
                if not self._pending:
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                await self._fleet.wait_serving()
                async with asyncio.TaskGroup() as tasks:
                    await self._ask_all(tasks)
            self._after = ()  # else each step would keep the one before it, and its rollouts, in memory
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            self._fleet.listeners.remove(self._wake.set)

    def add(self, request: Request) -> None:
        """Adds a request while the sampling is open. Requests of one group go to the server that has its prefix, if it
        is free."""
        self._group_tokens[request.group] += request.expected
        self._pending.append(request)
        self._wake.set()

    def withdraw(self, request: Request) -> None:
        """Cancels a request whose response nobody waits for any more; `take` is not called for it."""
        if request in self._pending:
            self._pending.remove(request)
        elif request.task is not None:
            request.task.cancel()

    def close(self) -> None:
        self._open = False
        self._wake.set()

    @property
    def begun(self) -> dict[str, Response]:
        """The partial responses, by name of the request, that a weight sync interrupted and that wait for the new
        weights."""
        return {request.name: request.begun for request in self._pending if request.begun is not None}

    async def _ask_all(self, tasks: asyncio.TaskGroup) -> None:
        """Sends requests. Returns when none is under way and none can be sent: all were sent, or no server is left."""
        fleet = self._fleet
        while True:
            self._wake.clear()
            servers, waiting = fleet.serving(), bool(self._pending)
            while self._pending and self._first and (member := self._choose(self._pending[0], servers)) is not None:
                request = self._pending.popleft()
                self._enter(request, member)
                request.task = tasks.create_task(self._one(request, member))
            if waiting and not self._pending:
                fleet.wake()  # the Samplings that wait for this one
            if not self._under_way and not (self._pending and (servers or fleet.syncing)):
                return
            await self._wake.wait()

    @property
    def _first(self) -> bool:
        return not any(sampling._pending for sampling in self._after)

    def _choose(self, request: Request, servers: dict[str, Server]) -> Server | None:
        failed = {*request.refused, *request.lost}  # another server is preferred where there is one
        allowed = {name: m for name, m in servers.items() if name not in failed} or servers
        loads = {name: m.load for name, m in allowed.items()}
        home, group_tokens = self._home.get(request.group), self._group_tokens[request.group]
        name = choose_server(loads, self._config.concurrency, home, group_tokens)
        return None if name is None else servers[name]

    def _enter(self, request: Request, member: Server) -> None:
        self._under_way += 1
        self._home[request.group] = member.name
        member.enter(request.expected)

    def _leave(self, request: Request, member: Server) -> None:
        self._under_way -= 1
        member.leave(request.expected)
        self._fleet.wake()

    async def _one(self, request: Request, member: Server) -> None:
        """Sends a request to one server; without an answer, the request becomes pending again."""
        try:
            response = await self._ask(request, member)
        except ServerLost as error:
            request.lost.append(member.name)
            member.use.retries += 1
            if not member.gone.done():
                await self._fleet.request_lost(member, error)
            if len(request.lost) < ATTEMPTS:
                self._pending.appendleft(request)
                return
            response = Response(error=f"{request.name}: lost with {', '.join(request.lost)}; the last: {error}")
        finally:
            self._leave(request, member)
        if response.finish_reason == "abort" and member.version is None and time.monotonic() < request.limit:
            request.syncs += 1  # a weight sync interrupted it: it is sent again, and continues under the new weights
            if response.tokens:
                request.begun = response if request.begun is None else request.begun.continued(response)
            self._pending.appendleft(request)
            return
        if response.finish_reason == "error":
            if not request.refused and len(self._fleet.serving()) > 1:
                request.refused.append(member.name)  # it may be that server's fault: another one is tried
                self._pending.appendleft(request)
                return
        else:
            member.refusals = 0
            for name in request.refused:
                self._fleet.refused(name, f"it refused {request.name}, which {member.name} answered")
        await self._done(request, response, member.name)

    async def _ask(self, request: Request, member: Server) -> Response:
        """Returns one server's response. Raises ServerLost also where the server leaves the rotation meanwhile."""
        now = time.monotonic()
        request.limit = request.limit or now + self._config.timeout_of(request.max_new_tokens)
        attempts = len(request.lost) + len(request.refused) + request.syncs
        most, begun = request.max_new_tokens, request.begun.tokens if request.begun else []
        inputs = request.tokens
        if begun:
            inputs = [*inputs, *begun]
            most = (most or self._config.max_new_tokens) - len(begun)
        asked = asyncio.create_task(
            member.client.generate(
                f"{request.name}-{attempts}" if attempts else request.name,
                inputs,
                timeout=max(0.0, request.limit - now),
                temperature=request.temperature,
                max_new_tokens=most,
                seed=request.seed,
                stop=request.stop,
            )
        )
        try:
            await asyncio.wait({asked, member.gone}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise ServerLost(f"{member.name} left the rotation: {member.gone.result()}")
            response = asked.result()
        finally:
            asked.cancel()
        member.use.tokens += len(response.tokens)
        return response

    async def _done(self, request: Request, response: Response, server: str) -> None:
        if response.error:
            response = replace(response, tokens=[], logprobs=[], weight_versions=[])
        elif request.begun is not None:
            response = request.begun.continued(response)
        await self._take(request, response, server)


def tail_seconds(finished: Sequence[float]) -> float:
    """Returns the seconds between the arrival of 90 % of the responses and that of the last one; 0 without
    responses."""
    times = sorted(finished)
    return times[-1] - times[max(0, -(-9 * len(times) // 10) - 1)] if times else 0.0
