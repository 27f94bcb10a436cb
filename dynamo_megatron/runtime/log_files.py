"""Logs of processes, which append to them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from dynamo_megatron.runtime.plain_text import PrintableStream

TAIL_BYTES = 1 << 20  # at a log's end: searched for the error that ended its process


def open_log(path: Path, mode: int) -> int:
    """Returns a descriptor that appends to a log. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode)


def log_to(path: Path) -> None:
    """Redirects stdout and stderr of this process, and of those that it starts, to the log. Raises OSError."""
    descriptor = open_log(path, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    print_printable()


def print_printable() -> None:
    """From now on everything that this process prints (tracebacks and warnings too) is made printable."""
    for name in ("stdout", "stderr"):
        raw = getattr(sys, name).buffer
        setattr(sys, name, PrintableStream(raw, "utf-8", errors="backslashreplace", line_buffering=True))


def mark(path: Path) -> int:
    """Returns where a log ends now, for `text_since`."""
    return path.stat().st_size if path.exists() else 0


def text_since(path: Path, begin: int) -> str:
    """Returns what was written to a log since `mark` returned `begin`, at most its last TAIL_BYTES; "" where
    there is none."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(begin, end - TAIL_BYTES))
        return file.read().decode(errors="replace")
