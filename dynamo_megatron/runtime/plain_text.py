"""Makes untrusted text (from models, users' code, data) safe to show in a terminal."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import traceback
from types import TracebackType
from typing import TextIO

TERMINAL_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")  # colours, cursor
# What could control a terminal: control characters except newline and tab, line separators, halves of surrogate pairs,
# and characters that change the direction of writing.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


def on_one_line(text: str, longest: int | None = None) -> str:
    """For messages: returns one line of at most `longest` characters (None: any number) and "..." where it was longer.
    Unprintable characters become blanks."""
    plain = TERMINAL_SEQUENCE.sub(" ", text)
    line = " ".join("".join(c if c.isprintable() else " " for c in plain).split())
    return line if longest is None or len(line) <= longest else f"{line[:longest]}..."


def error_line(error: BaseException, longest: int | None = None) -> str:
    """The type and the message of an error, as `on_one_line`; without a message the type alone."""
    text = str(error)
    return on_one_line(f"{type(error).__name__}: {text}" if text else type(error).__name__, longest)


def printable(text: str) -> str:
    """Returns `text` with everything that could control a terminal escaped."""
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text)


def escaped_line(text: str) -> str:
    """As `printable`, on one line: a newline is an escape too."""
    return printable(text).replace("\n", "\\n")


def show(text: str, file: TextIO | None = None) -> None:
    """Prints text of which a part may be untrusted; to stderr where no file is passed."""
    print(printable(text), file=file or sys.stderr, flush=True)


def show_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """For sys.excepthook: shows a traceback, whose message may quote untrusted text."""
    show("".join(traceback.format_exception(kind, error, trace)).rstrip("\n"))


class PrintableStream(io.TextIOWrapper):
    """The output of a process that writes to a log or runs the user's functions: all that it prints, logs or raises is
    made printable. What a full disk does not take is lost: printing does not fail."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            super().write(printable(text))
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()
