"""Standard output that takes no more, since its reader has ended or the disk is full, ends a command with one line."""

from __future__ import annotations

import errno
import io
import os
import sys

from dynamo_megatron.errors import StatedError


class OutputLost(StatedError):
    """A write to standard output failed. `closed`: its reader has ended."""

    def __init__(self, error: OSError):
        super().__init__(f"standard output: {error.strerror}")
        self.closed = error.errno == errno.EPIPE


class _Checked(io.FileIO):
    def write(self, data: bytes) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            # What is still to come, the interpreter's own flush at the end too, goes nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            raise OutputLost(error) from None


def check_standard_output() -> None:
    """From now on a failed write to `sys.stdout` raises OutputLost, which no handler of an OSError takes for its own.
    Where the process was started with standard output closed, what is printed goes nowhere."""
    own = sys.stdout
    if own is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    elif own is sys.__stdout__:  # else a caller of `main` has its own
        how = {"line_buffering": own.line_buffering, "write_through": own.write_through}
        raw = io.BufferedWriter(_Checked(own.fileno(), "w", closefd=False))
        sys.stdout = io.TextIOWrapper(raw, own.encoding, own.errors, **how)
