"""Calls in daemon threads: a server that does not answer blocks neither the main thread nor the end of the process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from dynamo_megatron.runtime.plain_text import on_one_line

POLL_EVERY = 0.1  # seconds
T = TypeVar("T")
FORESEEN = (RuntimeError, OSError)  # ServerError, errors of torch's groups and stores, and of the network


class Call:
    """One function call in a thread of its own."""

    def __init__(self, function: Callable[..., Any], *arguments: Any):
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(function, arguments), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[..., Any], arguments: tuple) -> None:
        try:
            self._value = function(*arguments)
        except BaseException as error:  # raised by `result`
            self._error = error

    def wait(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def failed(self) -> bool:
        return not self._thread.is_alive() and self._error is not None

    def result(self) -> Any:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._value


def for_each(
    things: Iterable[T], function: Callable[[T], Any], on_poll: Callable[[], None] | None
) -> tuple[list[tuple[T, Any]], list[tuple[T, str]]]:
    """Calls `function` for all things at once. Returns the things for which it returned, with the results, and those
    for which it failed, with the reasons.

    Only errors of FORESEEN count as failures; others are raised. `on_poll` is called during the wait, and may raise.
    """
    calls = [(thing, Call(function, thing)) for thing in things]
    for _, call in calls:
        while not call.wait(POLL_EVERY):
            if on_poll is not None:
                on_poll()
    done, failed = [], []
    for thing, call in calls:
        try:
            done.append((thing, call.result()))
        except FORESEEN as error:
            failed.append((thing, on_one_line(str(error)) or type(error).__name__))
    return done, failed
