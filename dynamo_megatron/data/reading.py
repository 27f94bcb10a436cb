"""Reads the user's iterator on a thread, so that a request to stop ends the wait for an item."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")
POLL_EVERY = 0.1  # seconds


class ReadingThread:
    """Takes items from iterators on a separate thread, which does not keep the process alive.

    An item is read only when it is requested, so at most one item is read ahead: that of an interrupted wait.
    """

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Iterator] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[object, BaseException | None]] = queue.SimpleQueue()
        self._waits = False
        threading.Thread(target=self._read, name="data", daemon=True).start()

    def next(self, items: Iterator[T], on_poll: Callable[[], None]) -> T | None:
        """The next item of `items`, None at their end. Raises what the iterator raises.

        `on_poll` is called every POLL_EVERY seconds of the wait. An exception of `on_poll` ends the wait, and the next
        call gets the item that this call requested.
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
            except BaseException as error:  # any exception is for the thread that called `next`
                self._answers.put((None, error))
