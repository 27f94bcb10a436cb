"""One node's servers: started in parallel, restarted when they end or are given up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from dynamo_megatron.config import Config
from dynamo_megatron.rollout.endpoint import Endpoint
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.rollout.server import POLL_EVERY, SGLangServer

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before a restart; doubled with each failure in a row
FAILED_STARTS = 4  # in a row, after which a server is not started again


class Listener(Protocol):
    """Hears of servers that come and go."""

    def up(self, endpoint: Endpoint) -> None:
        """Healthy, warm, with the weights it was started with."""

    def down(self, name: str, why: str, final: bool) -> None:
        """Gone, or not come up; `final`: for good, else a next incarnation follows."""


class Supervisor:
    """Keeps the servers `names` of this node running while `run` does, and tells `listener`.

    Raises ValueError where `rollout.host` or `rollout.port` cannot be used.
    """

    def __init__(self, config: Config, names: Sequence[str], listener: Listener):
        self._config, self._names, self._listener = config, list(names), listener
        self._running: dict[str, int] = {}  # name -> incarnation, from `up` on
        self._condemned: dict[str, tuple[int, str]] = {}
        self._first = [self._server(slot, 1) for slot in range(len(self._names))]

    def condemn(self, name: str, incarnation: int, why: str) -> None:
        """Has this incarnation of the server, or an earlier one, ended by force and started again."""
        self._condemned[name] = incarnation, why

    async def run(self) -> None:
        """For ever; cancel it. The servers are gone when it is."""
        async with asyncio.TaskGroup() as group:
            for slot, server in enumerate(self._first):
                group.create_task(self._keep(slot, server))

    def _server(self, slot: int, incarnation: int) -> SGLangServer:
        config, name = self._config, self._names[slot]
        log = Path(config.output_dir) / "logs" / f"sglang-{name}.log"
        slots = len(self._names)
        return SGLangServer(
            config.rollout, config.model, log, name=name, incarnation=incarnation, slot=slot, slots=slots
        )

    async def _keep(self, slot: int, server: SGLangServer) -> None:
        name = server.endpoint.name
        incarnation, failures = 1, 0
        while True:
            came_up = False
            try:
                if incarnation > 1:
                    server = self._server(slot, incarnation)
                server.start()
                try:
                    await server.wait_ready()
                    came_up, failures = True, 0
                    self._listener.up(server.endpoint)
                    why = await self._until_condemned(server)
                finally:
                    await _in_thread(server.stop)
            except (RolloutError, ValueError) as error:
                why = str(error)
            failures += not came_up
            final = failures >= FAILED_STARTS
            self._listener.down(name, why, final)
            if final:
                return
            await asyncio.sleep(min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** max(0, failures - 1)))
            incarnation += 1

    async def _until_condemned(self, server: SGLangServer) -> str:
        """Returns why. Raises RolloutError where the server ends by itself."""
        name, incarnation = server.endpoint.name, server.endpoint.incarnation
        while True:
            server.check()
            condemned, why = self._condemned.get(name, (0, ""))
            if condemned >= incarnation:
                return why
            await asyncio.sleep(POLL_EVERY)


async def _in_thread(call: Callable[[], None]) -> None:
    """To its end, also where this task is cancelled meanwhile."""
    work = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        with contextlib.suppress(asyncio.CancelledError):
            await work
        raise
