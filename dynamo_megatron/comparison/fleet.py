"""Servers that the compare command starts and that outlive a run: each run's first push gives them its weights.

A run uses them with `rollout.placement: external`. Their ports and API key stay the same when a server is restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from dynamo_megatron.config import Config
from dynamo_megatron.config.files import ConfigError
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.rollout.servers.endpoint import Endpoint
from dynamo_megatron.rollout.servers.fleet import server_names
from dynamo_megatron.rollout.servers.server import cuda_available, listening_address
from dynamo_megatron.rollout.servers.supervisor import Supervisor
from dynamo_megatron.runtime.free_ports import free_port
from dynamo_megatron.runtime.listening import http_url

KEY = "DYNAMO_MEGATRON_COMPARE_KEY"  # the environment variable with the API key of servers and runs
POLL_EVERY = 0.5  # seconds


def keeps_servers(config: Config) -> bool:
    """Returns True where the servers can stay up between runs: where they do not share GPUs with the ranks."""
    rollout = config.rollout
    if rollout.engine != "sglang" or rollout.placement == "external":
        return False
    return rollout.placement == "split" or not cuda_available()


class _Watched:
    """Records which servers are up; the supervisor calls it."""

    def __init__(self, names: list[str], say: Callable[[str], None]):
        self.up_now: set[str] = set()
        self.lost: dict[str, str] = {}  # servers that will not be restarted: name -> reason
        self._names, self._say = names, say

    def up(self, endpoint: Endpoint) -> None:
        self.up_now.add(endpoint.name)

    def down(self, name: str, why: str, final: bool) -> None:
        self._say(f"{name} is {'not started again' if final else 'started again'}: {why}")
        self.up_now.discard(name)
        if final:
            self.lost[name] = why

    @property
    def all_up(self) -> bool:
        return self.up_now == set(self._names)


@contextlib.asynccontextmanager
async def servers(
    config: Config, folder: Path, say: Callable[[str], None], stopped: Callable[[], bool]
) -> AsyncIterator[dict[str, Any]]:
    """Starts `rollout.servers` servers, with logs in FOLDER/logs. They end with the block, or with this process however
    it ends. Once all are up, or `stopped` returns True, yields the `rollout` keys for the runs that use them.

    Raises RolloutError where a server does not come up, ConfigError where host or port cannot be used.
    """
    names = server_names(config.rollout.servers, 1, 0)
    try:
        port = config.rollout.port or free_port(len(names))
        host = listening_address(config.rollout.host)
        keys = {
            "placement": "external",
            "urls": [http_url(host, port + i) for i in range(len(names))],
            "api_key_env": KEY,
            "port": port,
        }
        os.environ[KEY] = secrets.token_hex(32)
        rollout = config.rollout.model_copy(update=keys)
        watched = _Watched(names, say)
        supervisor = Supervisor(
            config.model_copy(update={"rollout": rollout, "output_dir": str(folder)}), names, watched
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    running = asyncio.create_task(supervisor.run())
    limit = config.rollout.start_timeout
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                while not (watched.all_up or watched.lost or stopped()):
                    await asyncio.sleep(POLL_EVERY)
        if not (watched.all_up or stopped()):
            missing = sorted(set(names) - watched.up_now)
            why = next(iter(watched.lost.values()), f"not up within rollout.start_timeout ({limit:g} s)")
            raise RolloutError(f"{', '.join(missing)}: {why}; see {folder / 'logs'}")
        yield keys
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
