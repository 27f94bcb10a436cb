"""The entry point of `dynamo-megatron`. Importing the commands takes a second; Ctrl-C works during the import, too."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import Any

HELP = {"-h", "--help", "--version"}


def main(argv: Sequence[str] | None = None) -> int:
    before = signal.signal(signal.SIGINT, _interrupted)  # what is imported may catch a KeyboardInterrupt
    # When one rank ends before the others, torch's store would print 30 lines of C++ frames on each of the others.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    arguments = list(sys.argv[1:] if argv is None else argv)
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
    except BrokenPipeError:
        looked = select.poll()
        looked.register(sys.stdout.fileno(), 0)
        if not looked.poll(0):
            raise  # else the reader of the output, such as a pager, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # takes what is still buffered
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return 130
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupted(_number: int, _frame: Any) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)
