"""The servers of a run as rank 0's rollout process knows them: which may answer, with which weights, and which are out.

A server is stale (healthy, with other weights than the policy's), serving, or being pushed to; it is out while it
starts. Until the first push all servers serve the weights of model.path, version 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import aiohttp

from dynamo_megatron.config import Config
from dynamo_megatron.errors import InputError
from dynamo_megatron.rollout.client import CONTROL_TIMEOUT, ConnectionLost, ServerLost, SGLangClient
from dynamo_megatron.rollout.result import PushNeeded, RolloutError, ServerUse
from dynamo_megatron.rollout.servers.announcements import Announced
from dynamo_megatron.rollout.servers.endpoint import Endpoint
from dynamo_megatron.rollout.servers.external import External
from dynamo_megatron.rollout.servers.health import answers
from dynamo_megatron.rollout.servers.member import Member, Source
from dynamo_megatron.rollout.servers.silence import Silence
from dynamo_megatron.rollout.servers.supervisor import Supervisor

HEALTH_EVERY = 2.0  # seconds
ABORT_EVERY = 0.5  # seconds
REFUSALS = 16  # requests in a row that a server does not take, after which it is restarted
CONNECTIONS = REFUSALS // 2  # of the connections lost within a MOMENT, at most this many count as refusals
MOMENT = 1.0  # seconds
REJECTED_SHARE = 0.5  # of a server's rollouts in one call: where more are rejected, it is restarted


class Fleet:
    """Keeps the clients of the servers that are up, and decides which may answer. `session` has to stay open until
    `run`, which keeps the servers, has ended.

    `listeners` are called when a server joins or leaves, or can take another request. A push is `begin_push` and then
    `end_push`; between them no server may answer. A `begin_push` that is cancelled or fails leaves the fleet in that
    state: `wait_serving` then returns after the next push only.
    """

    def __init__(self, config: Config, session: aiohttp.ClientSession, eos_token_ids: Sequence[int], vocab_size: int):
        self.config, self._session = config, session
        self._eos_token_ids, self._vocab_size = eos_token_ids, vocab_size
        self._members: dict[str, Member] = {}
        self._missing: dict[str, str] = {}  # name -> why it is out; only servers that were up or failed to start
        self._final: set[str] = set()  # names of servers that are not started again
        self._changed = asyncio.Event()
        self.version: int | None = None  # the policy's; None before the first push
        self.pushing = False
        self.listeners: list[Callable[[], None]] = []
        self._watchers, self._watch_task = 0, None
        self._used_since: float | None = None
        self.restarts: Counter[str] = Counter()  # since the last report
        self.notes: list[str] = []  # since the last report
        self._names, self._sources = self._arrange()

    def _arrange(self) -> tuple[list[str], dict[str, Source]]:
        rollout = self.config.rollout
        if rollout.placement == "external":
            urls = dict(zip(server_names(len(rollout.urls), 1, 0), rollout.urls, strict=True))
            return list(urls), dict.fromkeys(urls, External(self.config, urls, self))
        nodes = training_nodes() if rollout.placement == "colocated" else 0
        here = server_names(rollout.servers, nodes, 0) if nodes else []
        others = [n for n in server_names(rollout.servers, 1, 0) if n not in here]
        sources: dict[str, Source] = {}
        if here:
            sources |= dict.fromkeys(here, Supervisor(self.config, here, self))
        if others:
            sources |= dict.fromkeys(others, Announced(self.config.output_dir, others, self))
        return here + others, sources

    async def run(self) -> None:
        """Starts the servers and keeps them running until it is cancelled; then it stops them."""
        async with asyncio.TaskGroup() as group:
            for source in set(self._sources.values()):
                group.create_task(source.run())

    # -- what sources report ---------------------------------------------------------------------------------------
    def up(self, endpoint: Endpoint) -> None:
        if endpoint.name in self._members:
            self._leave(endpoint.name, "it was restarted")
        rollout = self.config.rollout
        client = SGLangClient(self._session, endpoint, rollout, self._eos_token_ids, self._vocab_size)
        version = 0 if self.version is None else None
        gone = asyncio.get_running_loop().create_future()
        self._members[endpoint.name] = Member(endpoint, client, self._sources[endpoint.name], version, gone)
        if self._missing.pop(endpoint.name, None) is not None:
            self.restarts[endpoint.name] += 1
        self._announce()

    def down(self, name: str, why: str, final: bool) -> None:
        self._leave(name, why)
        if final:
            self._final.add(name)
            self.notes.append(f"{name} is not started again: {why}")
        self._announce()

    def condemn(self, member: Member, why: str) -> None:
        """Takes the server out of the rotation and has it restarted."""
        if self._members.get(member.name) is member:
            self._leave(member.name, why)
            member.source.condemn(member.name, member.endpoint.incarnation, why)
            self._announce()

    def lost(self, endpoint: Endpoint, why: str) -> None:
        """Condemns the server at `endpoint` unless it has been restarted since."""
        if (member := self._member(endpoint)) is not None:
            self.condemn(member, why)

    def _member(self, endpoint: Endpoint) -> Member | None:
        """Returns the server at `endpoint`; None where it has been restarted or is out."""
        member = self._members.get(endpoint.name)
        return member if member is not None and member.endpoint == endpoint else None

    def _leave(self, name: str, why: str) -> None:
        member = self._members.pop(name, None)
        if member is not None:
            member.gone.set_result(why)
            self.notes.append(f"{name} left the rotation: {why}")
        elif name not in self._missing:
            self.notes.append(f"{name} did not come up: {why}")
        self._missing[name] = why

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self.wake()

    def wake(self) -> None:
        for listener in list(self.listeners):
            listener()

    # -- who may answer --------------------------------------------------------------------------------------------
    def serving(self) -> dict[str, Member]:
        """Returns the servers that have the policy's weights, by name."""
        version = 0 if self.version is None else self.version
        return {name: m for name, m in sorted(self._members.items()) if m.version == version}

    def clients(self, first: str = "") -> list[SGLangClient]:
        """Returns the clients of the servers that are up, whatever their weights. `first`: the name of the first one,
        where that server is up."""
        return [self._members[name].client for name in sorted(self._members, key=lambda name: (name != first, name))]

    async def wait_started(self) -> None:
        """Waits until one server is up and every other one is up or has failed to start, for at most
        `rollout.start_timeout` seconds. Raises RolloutError where none is up by then."""
        limit = self.config.rollout.start_timeout
        deadline = time.monotonic() + limit
        while not self._members or not self._members.keys() | self._missing.keys() >= set(self._names):
            if self._final >= set(self._names) or not await self._change(deadline):
                break
        if not self._members:
            raise RolloutError(self._why_none())
        if silent := sorted(set(self._names) - self._members.keys() - self._missing.keys()):
            self.notes.append(f"{', '.join(silent)} did not come up within rollout.start_timeout ({limit:g} s)")

    async def wait_serving(self) -> None:
        """Waits until a server may answer. Raises PushNeeded where a push is needed for that, RolloutError where no
        server comes up."""
        deadline = time.monotonic() + self.config.rollout.start_timeout
        while not self.serving():
            if self.pushing:
                await self._changed.wait()
                continue
            if self.version is not None:
                raise PushNeeded(f"no server has the weights of step {self.version}: {self._causes()}")
            if self._final >= set(self._names) or not await self._change(deadline):
                raise RolloutError(self._why_none())

    async def begin_push(self, version: int) -> list[Endpoint]:
        """See RolloutWorker.begin_push."""
        self.version, self.pushing = version, True
        deadline = time.monotonic() + self.config.rollout.start_timeout
        while True:
            members = list(self._members.values())
            for member in members:
                member.version = None
            await asyncio.gather(*map(self._rest, members))
            if ready := [m.endpoint for m in members if self._members.get(m.name) is m]:
                return sorted(ready, key=lambda e: e.name)
            if self._final >= set(self._names) or not await self._change(deadline):
                raise RolloutError(self._why_none())

    async def end_push(self, version: int, outcomes: Mapping[Endpoint, str | None]) -> None:
        """See RolloutWorker.end_push. Raises PushNeeded where not one server took the version."""
        for endpoint, failure in outcomes.items():
            if failure is not None:
                self.lost(endpoint, f"weight version {version} did not arrive: {failure}")
            elif (member := self._member(endpoint)) is not None:
                member.version = version
                member.source.served(endpoint.name)
        self.pushing = False
        self._announce()
        if not self.serving():
            raise PushNeeded(f"no server took the weights of step {version}: {self._causes()}")

    async def _rest(self, member: Member) -> None:
        try:
            await self._finish_requests(member)
            if not member.gone.done():
                await member.client.rest()
        except RolloutError as error:
            self.condemn(member, str(error))

    async def _finish_requests(self, member: Member) -> None:
        """Waits until the server has none of our requests under way. `rollout.at_push` decides whether each response is
        interrupted, to continue under the new weights, or generated to its end. Raises RolloutError."""
        deadline, silence = time.monotonic() + CONTROL_TIMEOUT, Silence()
        partial, limit = self.config.rollout.at_push == "partial", self.config.rollout.health_timeout
        while member.load.requests and not member.gone.done():
            member.rested.clear()
            if partial:
                if time.monotonic() > deadline:
                    raise RolloutError(f"{member.load.requests} requests did not end within {CONTROL_TIMEOUT:g} s")
                await member.client.abort_all()  # again and again: a request may have been on its way
            elif await self._answers(member, silence):
                silence.heard()
            else:
                raise RolloutError(f"no answer to /health for rollout.health_timeout ({limit:g} s)")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ABORT_EVERY if partial else HEALTH_EVERY):
                    await member.rested.wait()

    # -- watching --------------------------------------------------------------------------------------------------
    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Within this context, servers that may answer are checked for health. Others are not: an idle server generates
        a token for each check, which fails during a push and on a restarted server, whose memory may be released."""
        self._watchers += 1
        if self._watch_task is None:
            self._watch_task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            self._watchers -= 1
            if not self._watchers:
                watch, self._watch_task = self._watch_task, None
                watch.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watch

    async def _watch(self) -> None:
        tasks: dict[Member, asyncio.Task] = {}
        try:
            while True:
                for member in self.serving().values():
                    if member not in tasks:
                        tasks[member] = asyncio.create_task(self._watch_one(member))
                await asyncio.sleep(HEALTH_EVERY)
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _watch_one(self, member: Member) -> None:
        limit, silence = self.config.rollout.health_timeout, Silence()
        while not member.gone.done():
            await asyncio.sleep(min(HEALTH_EVERY, limit / 4))  # before the check: a short step needs none
            if member.version is None:
                silence.heard()
            elif await self._answers(member, silence):
                silence.heard()
                with contextlib.suppress(RolloutError):
                    member.kv_cache = max(member.kv_cache or 0.0, await member.client.kv_cache_share(HEALTH_EVERY))
            elif member.version is not None and silence.look() >= limit:  # a push may have begun meanwhile
                self.condemn(member, f"no answer to /health for rollout.health_timeout ({limit:g} s)")

    async def _answers(self, member: Member, silence: Silence) -> bool:
        """Returns whether /health answers 200 before `silence` reaches rollout.health_timeout."""
        return await answers(member.client, silence, self.config.rollout.health_timeout, HEALTH_EVERY)

    async def doubt(self, member: Member, error: ServerLost) -> None:
        """Called after a lost request: counts it, and checks whether the server is lost too."""
        if not isinstance(error, ConnectionLost):
            self.refused(member.name, str(error))
        else:
            if time.monotonic() - member.moment >= MOMENT:
                member.moment, member.lost = time.monotonic(), 0
            member.lost += 1
            if member.lost <= CONNECTIONS:
                self.refused(member.name, str(error))
        if not member.gone.done() and not await self._answers(member, Silence()):
            self.condemn(member, str(error))

    def refused(self, name: str, error: str) -> None:
        """Counts a request that the server did not take and another one may. After REFUSALS in a row the server is
        restarted."""
        if (member := self._members.get(name)) is not None:
            member.refusals += 1
            if member.refusals >= REFUSALS:
                self.condemn(member, f"it took none of {member.refusals} requests in a row; the last: {error}")

    def rejected(self, shares: Mapping[str, float]) -> None:
        """`shares`: the share of each server's rollouts that were rejected, since they were not sampled from the
        policy. Above REJECTED_SHARE the server is restarted."""
        for name, share in shares.items():
            if share > REJECTED_SHARE and name in self._members:
                self.condemn(self._members[name], f"{share:.0%} of its rollouts were rejected")

    def work_begins(self) -> None:
        self._used_since = self._used_since or time.monotonic()

    def take_use(self) -> tuple[float, dict[str, tuple[int, float]]]:
        """Returns the seconds since the last call (the first time: since `work_begins`), and for each server that is up
        the tokens that it sampled in them and the seconds with a request under way."""
        before, self._used_since = self._used_since, time.monotonic()
        return self._used_since - before, {name: member.take_use() for name, member in self._members.items()}

    def report(self) -> tuple[dict[str, ServerUse], list[str]]:
        """Returns what happened since the last report: counts by server, and notes."""
        uses = {name: ServerUse(restarts=count) for name, count in self.restarts.items()}
        for name, member in self._members.items():
            use = uses.setdefault(name, ServerUse())
            use.kv_cache, member.kv_cache = member.kv_cache, None
        notes, self.notes = self.notes, []
        self.restarts.clear()
        return uses, notes

    # -- words -----------------------------------------------------------------------------------------------------
    async def _change(self, deadline: float) -> bool:
        """Waits for a server to come or go; False at the deadline."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._changed.wait()
                return True
        return False

    def _causes(self) -> str:
        stale = sorted(self._members)
        causes = [f"{name}: {why}" for name, why in sorted(self._missing.items())]
        causes += [f"{', '.join(stale)} up and waiting for weights"] if stale else []
        return "; ".join(causes) or "none has come up yet"

    def _why_none(self) -> str:
        return (
            f"no rollout server came up within rollout.start_timeout ({self.config.rollout.start_timeout:g} s)"
            if not self._missing
            else f"no rollout server is up; {self._causes()}"
        )


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
