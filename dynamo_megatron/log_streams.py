"""Standard output and error of processes that write to a log: what the disk does not take is lost, and work goes on."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

CHUNK = 1 << 16  # bytes


class _Lossy(io.FileIO):
    def write(self, data) -> int:
        try:
            return super().write(data)
        except OSError:  # a full disk, a quota, a file system that is gone: none may end what is being logged
            return len(data)


def copy_output(pipe: int) -> None:
    """Writes to standard output what comes through `pipe`, until all who write to it have ended."""
    output = _Lossy(1, "wb", closefd=False)
    while data := os.read(pipe, CHUNK):
        output.write(data)


def log_to(path: Path) -> None:
    """From here on this process, and what it starts, writes to the end of the log `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    never_fail()


def never_fail() -> None:
    """`print`, tracebacks and warnings of this process raise nothing where its log cannot be written."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        raw = io.BufferedWriter(_Lossy(number, "wb", closefd=False))
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
        setattr(sys, name, stream)
