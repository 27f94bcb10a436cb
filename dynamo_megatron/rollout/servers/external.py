"""Servers that somebody else starts, on any host; they are used as they are (`rollout.placement: external`)."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Mapping

from dynamo_megatron.config import Config
from dynamo_megatron.errors import InputError
from dynamo_megatron.rollout.client import SGLangClient, open_session
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.rollout.servers.endpoint import Endpoint
from dynamo_megatron.rollout.servers.supervisor import Listener

RETRY_EVERY = 2.0  # seconds


class External:
    """Notifies `listener` of the servers at `urls` (by name) when they answer. Whoever runs them may start or restart
    them at any time: none is given up.

    Raises ValueError where `rollout.api_key_env` names a variable that is unset or empty.
    """

    def __init__(self, config: Config, urls: Mapping[str, str], listener: Listener):
        self._config, self._urls, self._listener = config, urls, listener
        variable = config.rollout.api_key_env
        if variable is not None and not os.environ.get(variable):
            raise InputError(f"rollout.api_key_env: the environment variable {variable} is not set")
        self._key = os.environ[variable] if variable is not None else ""
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
                    await client.model_info()
                    if not await client.healthy(limit):  # one that hangs still answers /model_info
                        raise RolloutError(f"no answer to /health within rollout.health_timeout ({limit:g} s)")
                    await client.freeze_gc()
                except RolloutError as error:
                    self._listener.down(name, str(error), False)
                else:
                    self._restart[name].clear()
                    self._listener.up(endpoint)
                    await self._restart[name].wait()
                await asyncio.sleep(RETRY_EVERY)
