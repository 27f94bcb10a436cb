"""Reading an iterator of the user's in such a way that a stop ends the wait for it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")
POLL_EVERY = 0.1  # seconds


class ReadingThread:
    """Takes items from iterators on one thread of its own, which does not keep the process alive.

    An item is read when it is asked for and not before, so that at most one is ahead: that of a wait which was ended.
    """

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Iterator] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[object, BaseException | None]] = queue.SimpleQueue()
        self._waits = False
        threading.Thread(target=self._read, name="data", daemon=True).start()

    def next(self, items: Iterator[T], on_poll: Callable[[], None]) -> T | None:
        """The next one of `items`, None at their end; raises what they raise.

        `on_poll` is called every POLL_EVERY seconds of the wait. What it raises ends the wait; the next call gets the
        item that this one has asked for.
        """
        if not self._waits:
            self._asked.put(items)
            self._waits = True
        while True:
            try:
                item, error = self._answers.get(timeout=POLL_EVERY)
            except queue.Empty:
                on_poll()
                continue
            self._waits = False
            if error is not None:
                raise error
            return item

    def _read(self) -> None:
        while True:
            items = self._asked.get()
            try:
                self._answers.put((next(items, None), None))
            except BaseException as error:  # whatever it is, it belongs to the thread that asked
                self._answers.put((None, error))
