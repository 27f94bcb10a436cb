"""A step's rollouts that are generated while the ranks do something else (`rollout.max_staleness`)."""

from __future__ import annotations

import asyncio

from dynamo_megatron.rollout.result import PushNeeded
from dynamo_megatron.rollout.sampling import Sampling
from dynamo_megatron.rollout.step_session import StepSession


class Dispatched:
    """Runs `sampling` for `session` from now on. Create it in a running event loop."""

    def __init__(self, session: StepSession, sampling: Sampling):
        self.session, self.sampling = session, sampling
        self._needs: PushNeeded | None = None
        self._asked, self._pushed = asyncio.Event(), asyncio.Event()  # set when `_needs` is set; when cleared
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            try:
                return await self.sampling.run()
            except PushNeeded as needed:
                self._needs = needed
            self._pushed.clear()
            self._asked.set()
            await self._pushed.wait()

    def pushed(self) -> None:
        """Continues after a push, even one in which no server took the weights."""
        self._needs = None
        self._asked.clear()
        self._pushed.set()

    async def over(self) -> None:
        """Waits until each request has its outcome. Raises PushNeeded where a push is needed for that, and whatever
        `Sampling.run` raises."""
        while not self._task.done():
            if self._needs is not None:
                raise self._needs
            asked = asyncio.create_task(self._asked.wait())
            try:
                await asyncio.wait({self._task, asked}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                asked.cancel()
        self._task.result()

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
