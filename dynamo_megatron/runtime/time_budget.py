"""A time limit that does not count the time during which this process was itself suspended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

LOOK_EVERY = 1.0  # seconds; a look that comes later than that counts as if it had come in time

T = TypeVar("T")


class TimeBudget:
    """The seconds that several awaits may take together. If this process is suspended (stopped, or waiting for a disk),
    that time counts for at most LOOK_EVERY seconds: an answer that came meanwhile is not late."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds

    async def spend(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns the result of `work`. Raises TimeoutError where nothing is left before it is done; then `work` is
        cancelled."""
        task = asyncio.create_task(work)
        try:
            while not task.done():
                if self.left <= 0:
                    raise TimeoutError
                begin, look = time.monotonic(), min(LOOK_EVERY, self.left)
                await asyncio.wait({task}, timeout=look)
                self.left -= min(time.monotonic() - begin, look)
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
