"""What a run is busy with: timed, shown to the user, and given the memory that it needs."""

from __future__ import annotations

import time

from dynamo_megatron.tracking.progress import Progress
from dynamo_megatron.weight_sync.memory import DeviceMemory

# A phase, and which of `resharding.memory.PHASES` it needs. A phase that is not here leaves the memory as it is.
MEMORY = {
    "generate": "generate",
    "evaluate": "generate",
    "logprobs": "weights",
    "push weights": "weights",
    "update": "train",
    "save": "save",
    "export": "save",
}


class Clock:
    """Seconds of a step by phase; a phase lasts until the next one begins."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """A step begins."""
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
    """Every rank's. `progress` is rank 0's, None elsewhere; `memory`: None where servers have memory of their own."""

    def __init__(self, progress: Progress | None, memory: DeviceMemory | None):
        self.clock, self.memory, self._progress = Clock(), memory, progress

    def begin(self, phase: str) -> None:
        """Collective over all ranks where they share memory with servers."""
        if self._progress is not None:
            self._progress.phase(phase)
        if self.memory is not None and phase in MEMORY:
            self.clock.begin("memory")
            self.memory.enter(MEMORY[phase])
        self.clock.begin(phase)
