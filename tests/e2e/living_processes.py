"""What of a run is still there, for tests that look for what it leaves behind."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import psutil

SHARED_MEMORY = "/dev/shm/"


def living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that are neither gone nor zombies. A process may end while it is looked at."""

    def lives(process: psutil.Process) -> bool:
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return [process for process in processes if lives(process)]


def shared_memory_of(pids: Iterable[int]) -> set[str]:
    """The files of POSIX shared memory that these processes map, by inode: a semaphore is created under one name, which
    stays in the maps of the process that created it, and is renamed at once."""
    mapped = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            mapped |= {int(line.split()[4]) for line in lines if SHARED_MEMORY in line}
    return {entry.path for entry in os.scandir(SHARED_MEMORY) if entry.stat(follow_symlinks=False).st_ino in mapped}
