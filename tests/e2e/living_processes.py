"""Which processes are still there, for tests that look for what a run leaves behind; and waiting for what they do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil


def living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that are neither gone nor zombies. A process may end while it is looked at."""

    def lives(process: psutil.Process) -> bool:
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return [process for process in processes if lives(process)]


def wait_until(condition: Callable[[], object], log: Path, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s: {log.read_text()}"
        time.sleep(0.05)
