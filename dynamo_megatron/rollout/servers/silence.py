"""Measures for how long another process has been silent while this one was running and could notice."""

from __future__ import annotations

import time

LATE = 5.0  # seconds between two calls of `look`; after a longer gap silence means nothing


class Silence:
    """Call `look` often: if more than LATE seconds pass between two calls, this process was itself suspended (by a
    stop, a disk, a long computation), and the count starts again."""

    def __init__(self) -> None:
        self._heard = self._looked = time.monotonic()

    def heard(self) -> None:
        """The other side has just given a sign of life."""
        self._heard = time.monotonic()

    def look(self) -> float:
        """Returns the seconds since the last sign of life."""
        before, self._looked = self._looked, time.monotonic()
        if self._looked - before > LATE:
            self._heard = self._looked
        return self._looked - self._heard
