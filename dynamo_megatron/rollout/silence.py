"""For how long another process has been silent, as far as this one was there to hear it."""

from __future__ import annotations

import time

LATE = 5.0  # seconds between two looks from which on nothing follows from what was not heard


class Silence:
    """Call `look` often: if more than LATE seconds pass between two calls, this process was itself suspended (a stop, a
    disk, a long computation), and the count starts again."""

    def __init__(self) -> None:
        self._heard = self._looked = time.monotonic()

    def heard(self) -> None:
        """The other side has just given a sign of life."""
        self._heard = time.monotonic()

    def look(self) -> float:
        """Seconds since it was last heard."""
        before, self._looked = self._looked, time.monotonic()
        if self._looked - before > LATE:
            self._heard = self._looked
        return self._looked - self._heard
