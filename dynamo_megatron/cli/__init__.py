"""The entry point of `dynamo-megatron`. Importing the commands takes a second; Ctrl-C works during the import, too."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from dynamo_megatron.errors import StatedError

HELP = {"-h", "--help", "--version"}
# These do nothing after they have printed, and their exit code says nothing of what they found: a reader that ends
# early, such as a pager, does not make them fail.
PRINTING = {"configs", "report", "samples", "replay"}


def main(argv: Sequence[str] | None = None) -> int:
    before = signal.signal(signal.SIGINT, _interrupted)  # what is imported may catch a KeyboardInterrupt
    # When one rank ends before the others, torch's store would print 30 lines of C++ frames on each of the others.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    arguments = list(sys.argv[1:] if argv is None else argv)
    _check_output()
    try:
        try:
            if HELP & {*arguments}:  # without the imports of the commands
                from dynamo_megatron.cli.options import parser

                parser().parse_known_args(arguments)
            from dynamo_megatron.cli.commands import carry_out

            signal.signal(signal.SIGINT, signal.default_int_handler)
            return carry_out(arguments)
        finally:
            sys.stdout.flush()
    except OutputLost as lost:
        if isinstance(lost.__cause__, BrokenPipeError) and (HELP & {*arguments} or PRINTING & {*arguments[:1]}):
            return 0
        print(lost, file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return 130
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupted(_number: int, _frame: Any) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)


class OutputLost(StatedError):
    """A write to standard output failed; the cause says why. No handler of an OSError takes it for its own."""


class _Output(io.FileIO):
    def write(self, data: bytes) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            # What is still to come, the interpreter's own flush at the end too, goes nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            raise OutputLost(f"standard output: {error.strerror}") from error


def _check_output() -> None:
    """From now on a failed write to `sys.stdout` raises OutputLost. What is printed goes nowhere where standard output
    was closed from the start."""
    if (own := sys.stdout) is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    elif own is sys.__stdout__:  # else a caller of `main` has its own
        raw = _Output(own.fileno(), "w", closefd=False)
        buffer = raw if own.write_through else io.BufferedWriter(raw)  # PYTHONUNBUFFERED
        options = {"line_buffering": own.line_buffering, "write_through": own.write_through}
        sys.stdout = io.TextIOWrapper(buffer, own.encoding, own.errors, **options)
