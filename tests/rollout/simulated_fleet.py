"""A Fleet before servers that exist in this process alone, under a clock that does not wait: thousands of steps with
servers that are killed, restarted and slow, in seconds."""

import asyncio
import contextlib
import random
import time
from dataclasses import dataclass, field

from stand_ins import external

from dynamo_megatron.rollout.client import Response, ServerLost
from dynamo_megatron.rollout.dispatch import Request
from dynamo_megatron.rollout.result import SyncNeeded
from dynamo_megatron.rollout.sampling import Sampling
from dynamo_megatron.rollout.servers import fleet as fleet_module
from dynamo_megatron.rollout.servers.fleet import Fleet
from dynamo_megatron.rollout.servers.server_api import Endpoint


class Clock(asyncio.SelectorEventLoop):
    """Stands still while there is something to do, and then jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self._now, select = 1000.0, self._selector.select

        def jump(timeout: float | None):
            assert timeout is not None, "nothing will ever happen again"
            self._now += timeout
            return select(0)

        self._selector.select = jump

    def time(self) -> float:
        return self._now


@dataclass
class Server:
    """`speed`: seconds a token. It is dead while `ended` is set, and answers nothing while it is `frozen`."""

    name: str
    speed: float
    version: int = 0
    incarnation: int = 0
    frozen: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)


class World:
    """Two servers, and a loop as the trainer's of `staleness` and `steps`: of each step four groups of two rollouts.
    `length(rollout's name)`: of its response. `faults`: what happens again and again, in the words of `_hurt`."""

    def __init__(self, seed: int, staleness: int, length, at_sync: str, faults=("killed", "frozen", "slow")):
        self.rng, self.staleness, self.length = random.Random(seed), staleness, length
        self.at_sync, self.faults = at_sync, faults
        self.responses: dict[str, Response] = {}
        self.trained: dict[int, list[str]] = {}  # step -> names
        self.hurt = 0  # times that a server was

    def run(self, monkeypatch, steps: int) -> None:
        loop = Clock()
        monkeypatch.setattr(time, "monotonic", loop.time)
        monkeypatch.setattr(fleet_module, "SGLangClient", lambda session, endpoint, *rest: Client(self, endpoint))
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(self._run(steps))

    async def _run(self, steps: int) -> None:
        self.servers = {f"server-{i}": Server(f"server-{i}", 0.01) for i in range(2)}
        limits = {"concurrency": 4, "max_new_tokens": 1000, "start_timeout": 900, "timeout": 100_000.0}
        config = external(["http://a", "http://b"], max_staleness=self.staleness, at_sync=self.at_sync, **limits)
        self.fleet = Fleet(config, None, [], 128)
        self.fleet._starters = dict.fromkeys(self.servers, self)
        for server in self.servers.values():
            self._up(server)
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(work) for work in (self._hurt(), self.fleet._watch())]
            await self._train(steps)
            for task in beside:
                task.cancel()

    def _up(self, server: Server) -> None:
        server.incarnation += 1
        server.version, server.frozen = 0, False
        server.ended, server.aborted = asyncio.Event(), asyncio.Event()
        self.fleet.up(Endpoint(server.name, server.incarnation, f"http://{server.name}", 1, ""))

    def restart(self, name: str, incarnation: int, why: str) -> None:
        server = self.servers[name]
        server.ended.set()
        asyncio.get_running_loop().call_later(self.rng.uniform(5, 60), self._up, server)

    async def _hurt(self) -> None:
        while True:
            await asyncio.sleep(self.rng.expovariate(1 / 30))
            server = self.rng.choice(list(self.servers.values()))
            self.hurt += 1
            match self.rng.choice(self.faults):
                case "killed":
                    server.ended.set()
                case "frozen":
                    server.frozen = True
                case "slow":
                    server.speed = self.rng.choice([0.001, 0.01, 0.1])
                case "held up":  # this process: all that was due meanwhile is due at once
                    asyncio.get_running_loop()._now += 2 * self.fleet.config.rollout.health_timeout

    async def _train(self, steps: int) -> None:
        ahead: dict[int, Sampling] = {}
        await self._push(0, ahead)
        done = 0
        for step in range(1, steps + 1):
            while done < min(step + self.staleness, steps):
                done += 1
                ahead[done] = self._dispatch(done)
            while True:
                try:
                    await ahead[step].wait()
                    break
                except SyncNeeded:
                    await self._push(step - 1, ahead)
            del ahead[step]
            self.trained[step] = self._names(step)
            await asyncio.sleep(self.rng.expovariate(1 / 2))  # the update
            await self._push(step, ahead)

    @staticmethod
    def _names(step: int) -> list[str]:
        return [f"{step}-{group}-{k}" for group in range(4) for k in range(2)]

    def _dispatch(self, step: int) -> Sampling:
        requests = [Request(n, n[:-2], n[:-2], [1, 2]) for n in self._names(step)]

        async def take(request: Request, response: Response, server: str) -> None:
            assert request.name not in self.responses, "a second outcome"
            self.responses[request.name] = response

        sampling = Sampling(self.fleet, requests, take)
        sampling.start()
        return sampling

    async def _push(self, version: int, ahead: dict[int, Sampling]) -> None:
        while True:
            endpoints = await self.fleet.begin_sync(version)
            outcomes = {}
            for endpoint in endpoints:
                await asyncio.sleep(self.rng.uniform(0, 0.5))
                server = self.servers[endpoint.name]
                alive = not server.ended.is_set() and not server.frozen and endpoint.incarnation == server.incarnation
                if alive:
                    server.version = version
                outcomes[endpoint] = None if alive else "it does not answer"
            with contextlib.suppress(SyncNeeded):
                await self.fleet.end_sync(version, outcomes)
                break
        for sampling in ahead.values():
            sampling.go_on()


class Client:
    """Of one incarnation of a server."""

    def __init__(self, world: World, endpoint: Endpoint):
        self._world, self._server = world, world.servers[endpoint.name]
        self._ended, self._incarnation = self._server.ended, endpoint.incarnation

    async def generate(self, request_id: str, prompt_tokens, *, max_new_tokens=None, **rest) -> Response:
        server, name = self._server, "-".join(request_id.split("-")[:3])
        version, begun = server.version, len(prompt_tokens) - 2
        left, made, aborted = self._world.length(name) - begun, 0, server.aborted
        while made < left and not aborted.is_set():
            await self._wait(min(left - made, 20) * server.speed)
            made += min(left - made, 20)
            assert server.version == version, f"new weights in the middle of {request_id}"
        whole = made == left
        tokens = [version % 100] * made
        return Response(
            tokens, [-1.0] * made, [(version, 0, made)], "length" if whole else "abort", "" if whole else "x"
        )

    async def _wait(self, seconds: float) -> None:
        """Raises ServerLost where the server ends meanwhile."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ended.wait()
        while self._server.frozen and not self._ended.is_set():
            await asyncio.sleep(1.0)
        if self._ended.is_set():
            raise ServerLost("the connection is gone")

    async def healthy(self, timeout: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await asyncio.sleep(1.0)  # as SGLang's
                while self._server.frozen and not self._ended.is_set():
                    await asyncio.sleep(1.0)
                return not self._ended.is_set()
        return False

    async def kv_cache_share(self, timeout: float) -> float:
        return 0.0

    async def abort_all(self) -> None:
        self._server.aborted.set()
        self._server.aborted = asyncio.Event()

    async def rest(self) -> None:
        await self.abort_all()
