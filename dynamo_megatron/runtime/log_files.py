"""Logs of processes that run for weeks: appended to by all that inherit the descriptor, and of bounded size.

A process that holds a log open cannot be made to open another one. So the end of a long log is copied to NAME.1,
replacing an older one, and the log is emptied while its writers, who all append, hold it open. Output that cannot be
written is dropped; the process continues.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import shutil
import stat
import sys
import threading
from pathlib import Path

from dynamo_megatron.runtime.plain_text import PrintableStream
from dynamo_megatron.runtime.whole_files import replacing

LOG_BYTES = 32 << 20  # a longer log is moved to NAME.1, which keeps as many bytes of its end
CHECK_EVERY = 10.0  # seconds
CHUNK = 1 << 16  # bytes
TAIL_BYTES = 1 << 20  # at a log's end: searched for the error that ended its process


def open_log(path: Path, mode: int) -> int:
    """Returns a descriptor that appends to a log. Raises OSError, also for a symbolic link."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, mode)


def log_to(path: Path) -> None:
    """Redirects stdout and stderr of this process, and of those that it starts, to the log. Raises OSError."""
    descriptor = open_log(path, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    never_fail()

    def keep_bounded() -> None:
        stop = threading.Event()  # never set
        while not stop.wait(CHECK_EVERY):
            bound_log(descriptor)

    threading.Thread(target=keep_bounded, name="log", daemon=True).start()


class _Lossy(io.FileIO):
    def write(self, data) -> int:
        try:
            return super().write(data)
        except OSError:  # a full disk, a quota, a file system that is gone: none may end what is being logged
            return len(data)


def never_fail() -> None:
    """From now on everything that this process prints (tracebacks and warnings too) is made printable, and nothing is
    raised where its log cannot be written."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        raw = io.BufferedWriter(_Lossy(number, "wb", closefd=False))
        setattr(sys, name, PrintableStream(raw, "utf-8", errors="backslashreplace", line_buffering=True))


def copy_output(pipe: int) -> None:
    """Writes to stdout what comes through the descriptor `pipe`, until all its writers have ended."""
    output = _Lossy(1, "wb", closefd=False)
    while data := os.read(pipe, CHUNK):
        output.write(data)


def bound_log(descriptor: int) -> None:
    """Moves the end of a long log to NAME.1. Ignores anything that is no log: a terminal, a file that is not appended
    to.

    The log is cut when NAME.1 has its name: a kill in between leaves both whole. What is written between the last read
    and the cut, about a millisecond, is lost. One process at a time does it: while a server is restarted, two have its
    log.
    """
    status = os.fstat(descriptor)
    appends = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND
    if not (stat.S_ISREG(status.st_mode) and appends and status.st_nlink) or status.st_size <= LOG_BYTES:
        return
    path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    # A full disk, or another process at it: nothing is cut, and it is tried again at the next check.
    with contextlib.suppress(OSError), open(f"/proc/self/fd/{descriptor}", "r+b") as log:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until `log` is closed, which was opened here alone
        if log.seek(0, os.SEEK_END) <= LOG_BYTES:
            return
        with replacing(_older(path), stat.S_IMODE(status.st_mode)) as older:
            log.seek(-LOG_BYTES, os.SEEK_END)
            shutil.copyfileobj(log, older)
        os.ftruncate(descriptor, 0)


def mark(path: Path) -> tuple[int, int]:
    """Returns where a log ends now, for `text_since`."""
    return path.stat().st_size if path.exists() else 0, _moved(path)


def text_since(path: Path, begin: tuple[int, int]) -> str:
    """Returns the last TAIL_BYTES of what was written to a log since `mark` returned `begin`, even if it was moved to
    NAME.1 meanwhile."""
    start, moved = begin
    if _moved(path) == moved:
        return _tail(path, start).decode(errors="replace")
    return (_tail(_older(path), 0) + _tail(path, 0))[-TAIL_BYTES:].decode(errors="replace")


def _older(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


def _moved(path: Path) -> int:
    """When a log was last moved, in ns; 0: never."""
    return _older(path).stat().st_mtime_ns if _older(path).exists() else 0


def _tail(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        return file.read()
