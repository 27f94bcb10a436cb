"""One node's servers: started in parallel, restarted when they end or fail. And servers that somebody else starts, on
any host, used as they are (`rollout.placement: external`)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from dynamo_megatron.config import Config
from dynamo_megatron.reward.http import key_of
from dynamo_megatron.rollout.client import SGLangClient, open_session
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.rollout.servers.server import POLL_EVERY, SGLangServer, cuda_available, shares_memory
from dynamo_megatron.rollout.servers.server_api import Endpoint
from dynamo_megatron.runtime.seeds import derived_seed

PAUSE = 1.0  # seconds before a restart; doubled with each start in a row that failed
FAILED_STARTS = 4  # in a row, after which a server is not started again
RETRY_EVERY = 2.0  # seconds, of an external server


def seed_arguments(config: Config, name: str) -> list[str]:
    """Returns the command line arguments that seed the server `name`. On a GPU SGLang uses a request's seed only in its
    deterministic mode, which is slower; a CPU server always does (sglang_cpu/seeded_sampling.py)."""
    arguments = ["--random-seed", str(derived_seed(config.seed, name) % 2**31)]
    if config.trainer.deterministic and cuda_available():
        arguments.append("--enable-deterministic-inference")
    return arguments


class Listener(Protocol):
    """Is notified of servers that come and go."""

    def up(self, endpoint: Endpoint) -> None:
        """The server is healthy and warm, with the weights it was started with; without its caches where it takes turns
        with ranks."""

    def down(self, name: str, why: str, final: bool) -> None:
        """The server is gone or did not come up. `final`: for good; otherwise another incarnation follows."""


class Supervisor:
    """Keeps the servers `names` of this node running while `run` does, and notifies `listener`.

    Raises ValueError where `rollout.host` or `rollout.port` cannot be used.
    """

    def __init__(self, config: Config, names: Sequence[str], listener: Listener):
        self._config, self._names, self._listener = config, list(names), listener
        self._restarts: dict[str, tuple[int, str]] = {}  # name -> incarnation that is to end, why
        self._may_start = asyncio.Event()
        self._may_start.set()
        self._first = [self._server(slot, 1) for slot in range(len(self._names))]

    def restart(self, name: str, incarnation: int, why: str) -> None:
        """Has this incarnation of the server, or an earlier one, killed and started again."""
        self._restarts[name] = incarnation, why

    def allow_starts(self, allowed: bool) -> None:
        """Whether servers may be started again from now on; until the first call they may."""
        if allowed:
            self._may_start.set()
        else:
            self._may_start.clear()

    async def run(self) -> None:
        """Runs until it is cancelled; by then the servers are gone."""
        async with asyncio.TaskGroup() as group:
            for slot, server in enumerate(self._first):
                group.create_task(self._keep(slot, server))

    def _server(self, slot: int, incarnation: int, cached_tokens: int | None = None) -> SGLangServer:
        config, name = self._config, self._names[slot]
        log = Path(config.output_dir) / "logs" / f"sglang-{name}.log"
        seeded = [*seed_arguments(config, name), *config.rollout.server_args]
        rollout = config.rollout.model_copy(update={"server_args": seeded})
        own = {"name": name, "incarnation": incarnation, "slot": slot, "slots": len(self._names)}
        return SGLangServer(rollout, config.model, log, **own, cached_tokens=cached_tokens)

    async def _keep(self, slot: int, server: SGLangServer) -> None:
        name = server.endpoint.name
        incarnation, failed_starts = 1, 0
        while failed_starts < FAILED_STARTS:
            failed_starts += 1
            try:
                if incarnation > 1:
                    server = self._server(slot, incarnation, server.cached_tokens)
                server.start()
                try:
                    await server.wait_ready()
                    if shares_memory(self._config.rollout):
                        if incarnation > 1 and not self._may_start.is_set():
                            failed_starts -= 1
                            raise RolloutError("it came up too late: the ranks have taken its GPU's memory")
                        # The ranks build the policy next, or send weights: the caches come back in a later phase.
                        await server.release_caches()
                    failed_starts = 0
                    self._listener.up(server.endpoint)
                    why = await self._until_failed(server)
                finally:
                    await _in_thread(server.stop)
            except (RolloutError, ValueError, OSError) as error:  # OSError: a disk that is full, a file handle lost
                why = str(error)
            print(f"{name}, start {incarnation}: {why}", flush=True)  # to the log of the process
            self._listener.down(name, why, failed_starts == FAILED_STARTS)
            await asyncio.sleep(PAUSE * 2**failed_starts)
            await self._may_start.wait()
            incarnation += 1

    async def _until_failed(self, server: SGLangServer) -> str:
        """Waits until this incarnation is to be restarted; returns why. Raises RolloutError where the server ends by
        itself."""
        while True:
            server.check()
            incarnation, why = self._restarts.get(server.endpoint.name, (0, ""))
            if incarnation >= server.endpoint.incarnation:
                return why
            await asyncio.sleep(POLL_EVERY)


class External:
    """Notifies `listener` of the servers at `urls` (by name) when they answer. Whoever runs them may start or restart
    them at any time: none is given up.

    Raises ValueError as `key_of` does for `rollout.api_key_env`.
    """

    def __init__(self, config: Config, urls: Mapping[str, str], listener: Listener):
        self._config, self._urls, self._listener = config, urls, listener
        self._key = key_of(config.rollout.api_key_env, "rollout.api_key_env")
        self._restart = {name: asyncio.Event() for name in urls}

    def restart(self, name: str, incarnation: int, why: str) -> None:
        self._restart[name].set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for name in self._urls:
                group.create_task(self._keep(name))

    async def _keep(self, name: str) -> None:
        rollout, limit = self._config.rollout, self._config.rollout.health_timeout
        async with open_session() as session:
            for incarnation in itertools.count(1):
                endpoint = Endpoint(name, incarnation, self._urls[name].rstrip("/"), rollout.tp, self._key)
                client = SGLangClient(session, endpoint, rollout, [])
                try:
                    if not await client.healthy(limit):
                        raise RolloutError(f"no answer to /health within rollout.health_timeout ({limit:g} s)")
                    await client.freeze_gc()
                except RolloutError as error:
                    self._listener.down(name, str(error), False)
                else:
                    self._restart[name].clear()
                    self._listener.up(endpoint)
                    await self._restart[name].wait()
                await asyncio.sleep(RETRY_EVERY)


async def _in_thread(call: Callable[[], None]) -> None:
    """Runs `call` in a thread to its end, even if this task is cancelled meanwhile."""
    work = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        with contextlib.suppress(asyncio.CancelledError):
            await work
        raise
