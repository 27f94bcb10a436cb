"""Calls in daemon threads: a server that does not answer blocks neither the main thread nor the end of the process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from dynamo_megatron.runtime.plain_text import on_one_line

POLL_EVERY = 0.1  # seconds
T = TypeVar("T")
FORESEEN = (RuntimeError, OSError)  # ServerError, errors of torch's groups and stores, and of the network


def first_error(error: T) -> T | BaseException:
    """Returns the first error in the groups in which asyncio's task groups raise it; what is no group as it is."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class Call(Future):
    """One function call in a thread of its own."""

    def __init__(self, function: Callable[..., Any], *arguments: Any):
        super().__init__()
        threading.Thread(target=self._run, args=(function, arguments), daemon=True).start()

    def _run(self, function: Callable[..., Any], arguments: tuple) -> None:
        try:
            self.set_result(function(*arguments))
        except BaseException as error:  # raised by `result`
            self.set_exception(error)

    def wait(self, seconds: float) -> bool:
        return bool(wait([self], seconds).done)

    def failed(self) -> bool:
        return self.done() and self.exception() is not None


def for_each(
    things: Iterable[T],
    function: Callable[[T], Any],
    on_poll: Callable[[], None] | None,
    meanwhile: Callable[[], None] | None = None,
) -> tuple[list[tuple[T, Any]], list[tuple[T, str]]]:
    """Calls `function` for all things at once. Returns the things for which it returned, with the results, and those
    for which it failed, with the reasons.

    Only errors of FORESEEN count as failures; others are raised. `meanwhile` is called once, here, while the calls run,
    then during the wait `on_poll`; both may raise.
    """
    calls = [(thing, Call(function, thing)) for thing in things]
    if meanwhile is not None:
        meanwhile()
    while wait([call for _, call in calls], POLL_EVERY).not_done:
        if on_poll is not None:
            on_poll()
    done, failed = [], []
    for thing, call in calls:
        try:
            done.append((thing, call.result()))
        except FORESEEN as error:
            failed.append((thing, on_one_line(str(error)) or type(error).__name__))
    return done, failed
