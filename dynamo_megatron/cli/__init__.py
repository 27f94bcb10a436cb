"""The entry point of `dynamo-megatron`. Importing the commands takes a second."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

HELP = {"-h", "--help", "--version"}


def main(argv: Sequence[str] | None = None) -> int:
    # When one rank ends before the others, torch's store would print 30 lines of C++ frames on each of the others.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            if HELP & {*arguments}:  # without the imports of the commands
                from dynamo_megatron.cli.options import parser

                parser().parse_known_args(arguments)
            from dynamo_megatron.cli.commands import carry_out

            return carry_out(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output, such as a pager, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # takes what is still buffered
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return 130
