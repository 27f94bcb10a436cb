"""The phases of a run: each is timed, shown to the user, and given the device memory that it needs."""

from __future__ import annotations

import time

from dynamo_megatron.tracking.progress import Progress
from dynamo_megatron.weight_sync.memory import PHASES, DeviceMemory


class Clock:
    """Seconds of a step by phase; a phase lasts until the next one begins."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begins a new step."""
        self.seconds: dict[str, float] = {}
        self._phase, self._since = "", time.monotonic()
        self._start = self._since

    def begin(self, phase: str) -> None:
        now = time.monotonic()
        self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now

    @property
    def total(self) -> float:
        """Seconds since the step began."""
        return time.monotonic() - self._start


class Phases:
    """`progress`: rank 0's, None elsewhere. `memory`: None where servers have memory of their own."""

    def __init__(self, progress: Progress | None, memory: DeviceMemory | None):
        self.clock, self.memory, self._progress = Clock(), memory, progress

    def begin(self, phase: str) -> None:
        """Begins `phase`. Collective over all ranks if they share memory with servers."""
        if self._progress is not None:
            self._progress.phase(phase)
        if self.memory is not None and phase in PHASES:
            self.clock.begin("memory")
            self.memory.enter(phase)
        self.clock.begin(phase)
