"""Measures how long the phases of a step take."""

from __future__ import annotations

import time


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
