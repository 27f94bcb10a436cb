"""The servers of a run as rank 0's rollout process knows them: which may answer, with which weights, and which are out.

A server is stale (healthy, with other weights than the policy's), serving, or in a weight sync; it is out while it
starts. Until the first weight sync all servers serve the weights of model.path, version 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import math
import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import aiohttp

from dynamo_megatron.config import Config
from dynamo_megatron.errors import InputError
from dynamo_megatron.rollout.client import ServerLost, SGLangClient
from dynamo_megatron.rollout.dispatch import Request, choose_server
from dynamo_megatron.rollout.result import RolloutError, ServerUse, SyncNeeded
from dynamo_megatron.rollout.servers.announcements import Announced
from dynamo_megatron.rollout.servers.server import shares_memory
from dynamo_megatron.rollout.servers.server_api import CONTROL_TIMEOUT, Endpoint
from dynamo_megatron.rollout.servers.supervisor import External, Supervisor
from dynamo_megatron.runtime.routes import RouteShape

HEALTH_EVERY = 2.0  # seconds
ABORT_EVERY = 0.5  # seconds
REFUSALS = 16  # requests in a row that a server does not take, after which it is restarted
REJECTED_SHARE = 0.5  # of a server's rollouts in one call: where more are rejected, it is restarted


class NoServer(Exception):
    """No server is serving, and no weight sync is under way that may change it."""


Starter: TypeAlias = Supervisor | Announced | External  # starts servers, and restarts them


@dataclass(eq=False)
class Server:
    """A server that is up. `version`: that of its weights, None if they are not the policy's. `gone`: set when it is
    out, to the reason."""

    endpoint: Endpoint
    client: SGLangClient
    version: int | None
    gone: asyncio.Future
    use: ServerUse  # since the last `take_use`
    requests: int = 0  # under way
    refusals: int = 0  # in a row
    breaks: int = 0  # broken connections that were counted
    busy_since: float = 0.0  # monotonic seconds: busy time from here on is not in `use` yet
    heard: float = -math.inf  # monotonic seconds: its last response, or the first request since it rested
    rested: asyncio.Event = field(default_factory=asyncio.Event)  # set when nothing is under way any more

    @property
    def name(self) -> str:
        return self.endpoint.name

    def enter(self) -> None:
        """Counts in a request."""
        if not self.requests:
            self.busy_since = self.heard = time.monotonic()
        self.requests += 1

    def leave(self) -> None:
        self.requests -= 1
        if not self.requests:
            self.use.busy += time.monotonic() - self.busy_since
            self.rested.set()


async def answers(client: SGLangClient, limit: float) -> bool:
    """Returns whether /health answers 200 within `limit` seconds, asked twice: where this process was itself stopped
    meanwhile, the first answer comes too late."""
    return await client.healthy(limit / 2) or await client.healthy(limit / 2)


class Fleet:
    """Keeps the clients of the servers that are up, and decides which may answer. `session` has to stay open until
    `run`, which keeps the servers, has ended.

    A weight sync is `begin_sync` and then `end_sync`; between them no server may answer. A `begin_sync` that is
    cancelled or fails leaves the fleet in that state: `wait_serving` then returns after the next weight sync only.
    """

    def __init__(
        self,
        config: Config,
        session: aiohttp.ClientSession,
        eos_token_ids: Sequence[int],
        vocab_size: int,
        routes: RouteShape | None = None,
    ):
        self.config, self._session, self._routes = config, session, routes
        self._without_routes: set[str] = set()  # servers that have been noted for it
        self._eos_token_ids, self._vocab_size = eos_token_ids, vocab_size
        self._servers: dict[str, Server] = {}
        self._missing: dict[str, str] = {}  # name -> why it is out; only servers that were up or failed to start
        self._final: set[str] = set()  # names of servers that are not started again
        self._late: set[str] = set()  # names of servers that were waited for in vain: not again until they are up
        self._changed = asyncio.Event()
        self.version: int | None = None  # the policy's; None before the first weight sync
        self.syncing = False
        self._waiting: list[tuple[tuple[int, int], int, Request, asyncio.Future[Server]]] = []  # a heap
        self._numbers = itertools.count(1)
        self._used_since = 0.0  # monotonic seconds
        self.uses: defaultdict[str, ServerUse] = defaultdict(ServerUse)  # by server, since the last `take_use`
        self.notes: list[str] = []  # for the user, since they were last taken
        self._starters = self._make_starters()
        # A server sizes its KV cache by what is free as it starts: where ranks share its GPU, it starts only before
        # they take memory, and in `begin_sync`, while all that they have there is the weights.
        self._shares = shares_memory(config.rollout)

    def _make_starters(self) -> dict[str, Starter]:
        """By name of the server."""
        config, rollout = self.config, self.config.rollout
        if rollout.placement == "external":
            urls = dict(zip(server_names(len(rollout.urls), 1, 0), rollout.urls, strict=True))
            return dict.fromkeys(urls, External(config, urls, self))
        starters: dict[str, Starter] = {}
        here = server_names(rollout.servers, training_nodes(), 0) if rollout.placement == "colocated" else []
        if here:
            starters |= dict.fromkeys(here, Supervisor(config, here, self))
        if others := [name for name in server_names(rollout.servers, 1, 0) if name not in here]:
            starters |= dict.fromkeys(others, Announced(config.output_dir, others, self))
        return starters

    async def run(self) -> None:
        """Starts the servers and keeps them running until it is cancelled; then it stops them."""
        async with asyncio.TaskGroup() as group:
            for starter in set(self._starters.values()):
                group.create_task(starter.run())
            group.create_task(self._watch())

    # -- what is said of servers -----------------------------------------------------------------------------------
    def up(self, endpoint: Endpoint) -> None:
        if endpoint.name in self._servers:
            self._leave(endpoint.name, "it was restarted")
        self._final.discard(endpoint.name)  # another node may have taken it over
        self._late.discard(endpoint.name)
        rollout = self.config.rollout
        client = SGLangClient(self._session, endpoint, rollout, self._eos_token_ids, self._vocab_size, self._routes)
        gone = asyncio.get_running_loop().create_future()
        self._servers[endpoint.name] = Server(
            endpoint, client, 0 if self.version is None else None, gone, self.uses[endpoint.name]
        )
        if self._missing.pop(endpoint.name, None) is not None:
            self.uses[endpoint.name].restarts += 1
        self._announce()

    def down(self, name: str, why: str, final: bool) -> None:
        self._final |= {name} if final else set()
        self._leave(name, why)
        if final:
            self.notes.append(f"{name} is not started again: {why}")
        self._announce()

    def mark_failed(self, endpoint: Endpoint, why: str) -> None:
        """Takes the server at `endpoint` out of the rotation and has it restarted, unless it is out already."""
        if self._at(endpoint) is not None:
            self._leave(endpoint.name, why)
            self._starters[endpoint.name].restart(endpoint.name, endpoint.incarnation, why)
            self._announce()

    def _at(self, endpoint: Endpoint) -> Server | None:
        """Returns the server at `endpoint`; None where it has been restarted or is out."""
        server = self._servers.get(endpoint.name)
        return server if server is not None and server.endpoint == endpoint else None

    def _leave(self, name: str, why: str) -> None:
        if (server := self._servers.pop(name, None)) is not None:
            server.gone.set_result(why)
            self.notes.append(f"{name} left the rotation: {why}")
        elif name not in self._missing:
            self.notes.append(f"{name} did not come up: {why}")
        self._missing[name] = why

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self._assign()

    # -- who may answer --------------------------------------------------------------------------------------------
    def serving(self) -> dict[str, Server]:
        """Returns the servers that have the policy's weights, by name."""
        version = 0 if self.version is None else self.version
        return {name: server for name, server in sorted(self._servers.items()) if server.version == version}

    def next_number(self, urgent: bool) -> int:
        """Returns a number for the `order` of requests: larger than all before; 0 for those that are urgent."""
        return 0 if urgent else next(self._numbers)

    async def acquire(self, request: Request) -> Server:
        """Waits until a server can take the request, and counts it in there. Raises NoServer."""
        found = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (request.order, next(self._numbers), request, found))
        self._assign()
        try:
            return await found
        except asyncio.CancelledError:
            if not found.cancelled() and found.exception() is None:
                self.release(found.result())
            raise

    def release(self, server: Server) -> None:
        """Counts a request out."""
        server.leave()
        self._assign()

    def _assign(self) -> None:
        """Gives servers to the waiting requests, in their order. One that was lost with a server waits for others as
        long as there are any, and does not keep later requests from that server."""
        servers, kept = self.serving(), []
        while self._waiting:
            *_, request, found = waiting = heapq.heappop(self._waiting)
            if not servers and not self.syncing and not found.done():
                found.set_exception(NoServer())
            if not found.done():
                failed = {*request.refused, *request.lost}
                allowed = {name: server for name, server in servers.items() if name not in failed} or servers
                loads = {name: server.requests for name, server in allowed.items()}
                if (name := choose_server(loads, self.config.rollout.concurrency, request.siblings)) is None:
                    kept.append(waiting)
                    if len(allowed) == len(servers):
                        break
                    continue
                request.siblings.home = name
                servers[name].enter()
                found.set_result(servers[name])
        for waiting in kept:
            heapq.heappush(self._waiting, waiting)

    def clients(self, first: str = "") -> list[SGLangClient]:
        """Returns the clients of the servers that are up, whatever their weights. `first`: the name of the first one,
        where that server is up."""
        return [self._servers[name].client for name in sorted(self._servers, key=lambda name: (name != first, name))]

    async def wait_started(self) -> None:
        """Waits until one server is up and every other one is up or has failed to start (where it shares memory with
        ranks, for good), for at most `rollout.start_timeout` seconds. Raises RolloutError where none is up by then."""
        limit, names = self.config.rollout.start_timeout, self._starters.keys()
        deadline = time.monotonic() + limit
        while not self._servers or self._starting() or not self._servers.keys() | self._missing.keys() >= names:
            if not await self._change(deadline):
                self._late |= self._out()
                break
        self._allow_starts(not self._shares)
        if not self._servers:
            raise RolloutError(self._why_none())
        if silent := sorted(names - self._servers.keys() - self._missing.keys()):
            self.notes.append(f"{', '.join(silent)} did not come up within rollout.start_timeout ({limit:g} s)")

    async def wait_serving(self) -> None:
        """Waits until a server may answer. Raises SyncNeeded where a weight sync is needed for that, RolloutError where
        no server comes up."""
        deadline = time.monotonic() + self.config.rollout.start_timeout
        while not self.serving():
            if self.syncing:
                await self._changed.wait()
            elif self.version is not None:
                raise SyncNeeded(f"no server has the weights of step {self.version}: {self._causes()}")
            elif not await self._change(deadline):
                raise RolloutError(self._why_none())

    async def begin_sync(self, version: int) -> list[Endpoint]:
        """See RolloutWorker.begin_sync."""
        self.version, self.syncing = version, True
        self._allow_starts(True)
        try:
            return await self._all_at_rest(time.monotonic() + self.config.rollout.start_timeout)
        finally:
            self._allow_starts(not self._shares)

    async def _all_at_rest(self, deadline: float) -> list[Endpoint]:
        while True:
            while self._starting():
                if not await self._change(deadline):
                    self._late |= self._out()
            servers = list(self._servers.values())
            for server in servers:
                server.version = None
            await asyncio.gather(*map(self._rest, servers))
            ready = [server.endpoint for server in servers if not server.gone.done()]
            if ready and not self._starting():
                return sorted(ready, key=lambda endpoint: endpoint.name)
            if not ready and not await self._change(deadline):
                raise RolloutError(self._why_none())

    def _out(self) -> set[str]:
        """Names of the servers that are neither up nor down for good."""
        return set(self._starters.keys() - self._servers.keys() - self._final)

    def _starting(self) -> bool:
        """Whether a server that shares memory with ranks is to be waited for."""
        return self._shares and bool(self._out() - self._late)

    def _allow_starts(self, allowed: bool) -> None:
        for starter in set(self._starters.values()) if self._shares else ():
            starter.allow_starts(allowed)

    async def end_sync(self, version: int, outcomes: Mapping[Endpoint, str | None]) -> None:
        """See RolloutWorker.end_sync. Raises SyncNeeded where not one server took the version."""
        for endpoint, failure in outcomes.items():
            if failure is not None:
                self.mark_failed(endpoint, f"weight version {version} did not arrive: {failure}")
            elif (server := self._at(endpoint)) is not None:
                server.version = version
        self.syncing = False
        self._announce()
        if not self.serving():
            raise SyncNeeded(f"no server took the weights of step {version}: {self._causes()}")

    async def _rest(self, server: Server) -> None:
        try:
            await self._finish_requests(server)
            if not server.gone.done():
                await server.client.rest()
        except RolloutError as error:
            self.mark_failed(server.endpoint, str(error))

    async def _finish_requests(self, server: Server) -> None:
        """Waits until the server has none of our requests under way. `rollout.at_sync` decides whether each response is
        interrupted, to continue under the new weights, or generated to its end. Raises RolloutError."""
        left, partial = math.inf, self.config.rollout.at_sync == "partial"
        while server.requests and not server.gone.done():
            server.rested.clear()
            if partial:
                if server.requests < left:  # long replies of many requests take their time
                    left, deadline = server.requests, time.monotonic() + CONTROL_TIMEOUT
                elif time.monotonic() > deadline:
                    raise RolloutError(f"none of {left} requests ended within {CONTROL_TIMEOUT:g} s")
                await server.client.abort_all()  # again and again: a request may have been on its way
            try:
                async with asyncio.timeout(ABORT_EVERY if partial else HEALTH_EVERY):
                    await server.rested.wait()
            except TimeoutError:
                if not partial and time.monotonic() - server.heard > HEALTH_EVERY:
                    await self._check(server)

    # -- watching --------------------------------------------------------------------------------------------------
    async def _watch(self) -> None:
        """Checks the servers with requests under way that have been silent. An idle server generates a token for each
        check, which fails during a weight sync and on a restarted server, whose memory may be released. SGLang answers
        a check after a second, and until then no weight update begins: one that answers requests is not checked."""
        while True:
            await asyncio.sleep(min(HEALTH_EVERY, self.config.rollout.health_timeout / 4))
            busy = [server for server in self.serving().values() if server.requests]
            await asyncio.gather(*map(self._watch_one, busy))

    async def _watch_one(self, server: Server) -> None:
        try:
            if time.monotonic() - server.heard > HEALTH_EVERY:
                await self._check(server)
        except RolloutError as error:
            if server.version is not None:  # else a weight sync has begun meanwhile
                self.mark_failed(server.endpoint, str(error))
            return
        with contextlib.suppress(RolloutError):
            share = await server.client.kv_cache_share(HEALTH_EVERY)
            server.use.kv_cache = max(server.use.kv_cache or 0.0, share)

    async def _check(self, server: Server) -> None:
        """Raises RolloutError where the server does not answer."""
        limit = self.config.rollout.health_timeout
        if not await answers(server.client, limit):
            raise RolloutError(f"no answer to /health within rollout.health_timeout ({limit:g} s)")

    async def request_lost(self, server: Server, error: ServerLost, breaks: int) -> None:
        """Counts a lost request, and checks whether the server is lost too. `breaks`: the server's when the request was
        sent. All connections that are under way may break at once, which counts as one."""
        broken = isinstance(error.__cause__, aiohttp.ClientError)
        if not broken or breaks == server.breaks:
            server.breaks += broken
            self.refused(server.name, str(error))
        if not server.gone.done() and not await answers(server.client, self.config.rollout.health_timeout):
            self.mark_failed(server.endpoint, str(error))

    def refused(self, name: str, error: str) -> None:
        """Counts a request that the server did not take and another one may. After REFUSALS in a row the server is
        restarted."""
        if (server := self._servers.get(name)) is not None:
            server.refusals += 1
            if server.refusals >= REFUSALS:
                why = f"it took none of {server.refusals} requests in a row; the last: {error}"
                self.mark_failed(server.endpoint, why)

    def returned_no_routes(self, server: Server) -> None:
        """Notes it, once for each server: one of somebody else's may have been started without them."""
        if self._routes is not None and server.name not in self._without_routes:
            self._without_routes.add(server.name)
            self.notes.append(
                f"{server.name} returns no routed experts, and what it samples is trained without router replay; start "
                "it with --enable-return-routed-experts, on Blackwell GPUs also --moe-runner-backend triton (in "
                "rollout.server_args, where this run starts it), or set rollout.router_replay to false"
            )

    def rejected(self, shares: Mapping[str, float]) -> None:
        """`shares`: the share of each server's rollouts that were rejected, since they were not sampled from the
        policy. Above REJECTED_SHARE the server is restarted, unless it waits for weights after another start."""
        for name, share in shares.items():
            server = self._servers.get(name)
            if share > REJECTED_SHARE and server is not None and server.version is not None:
                self.mark_failed(server.endpoint, f"{share:.0%} of its rollouts were rejected")

    # -- use -------------------------------------------------------------------------------------------------------
    def work_begins(self) -> None:
        """Forgets what evaluations have used."""
        self._used_since = time.monotonic()
        for use in self.uses.values():
            use.tokens, use.busy, use.retries = 0, 0.0, 0

    def take_use(self) -> tuple[float, dict[str, ServerUse]]:
        """Returns the seconds since the last call, or since `work_begins`, and what each server did in them."""
        before, self._used_since = self._used_since, time.monotonic()
        uses, self.uses = dict(self.uses), defaultdict(ServerUse)
        for name, server in self._servers.items():
            if server.requests:
                server.use.busy += self._used_since - server.busy_since
                server.busy_since = self._used_since
            server.use = self.uses[name]
        return self._used_since - before, uses

    async def _change(self, deadline: float) -> bool:
        """Waits for a server to come or go; False at the deadline, or where all are out for good."""
        if self._final >= self._starters.keys():
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._changed.wait()
                return True
        return False

    def _causes(self) -> str:
        stale = sorted(self._servers)
        causes = [f"{name}: {why}" for name, why in sorted(self._missing.items())]
        causes += [f"{', '.join(stale)} up and waiting for weights"] if stale else []
        return "; ".join(causes) or "none has come up yet"

    def _why_none(self) -> str:
        if self._missing:
            return f"no rollout server is up; {self._causes()}"
        return f"no rollout server came up within rollout.start_timeout ({self.config.rollout.start_timeout:g} s)"


def server_names(servers: int, nodes: int, node: int) -> list[str]:
    """Returns the names of the servers on node `node`, an equal share. Raises ValueError where `servers` is not a
    multiple of `nodes`."""
    if servers % nodes:
        raise InputError(f"rollout.servers: {servers} servers are not an equal share for each of {nodes} nodes")
    share = servers // nodes
    return [f"server-{i}" for i in range(node * share, (node + 1) * share)]


def training_nodes() -> int:
    """Returns the number of nodes of this run, from its launcher's environment variables; 1 without a launcher."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    return world // int(os.environ.get("LOCAL_WORLD_SIZE", world))
