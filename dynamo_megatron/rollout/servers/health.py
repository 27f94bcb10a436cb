"""Checks whether a server answers, even if this process was itself suspended meanwhile."""

from __future__ import annotations

import asyncio
import math

from dynamo_megatron.rollout.client import SGLangClient
from dynamo_megatron.rollout.servers.silence import Silence


async def answers(client: SGLangClient, silence: Silence, limit: float, look_every: float) -> bool:
    """Returns whether /health answers 200 before `silence` reaches `limit` seconds. Looks every `look_every`
    seconds."""
    asked = asyncio.create_task(client.healthy(math.inf))
    try:
        while not asked.done() and (left := limit - silence.look()) > 0:
            await asyncio.wait({asked}, timeout=min(look_every, left))
        return asked.done() and asked.result()
    finally:
        asked.cancel()
