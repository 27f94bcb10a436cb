"""The entry point of `dynamo-megatron`. Importing the commands takes a second; Ctrl-C works during the import, too."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

SOCKETS = 60  # bytes of the name of a temporary folder; its sockets have 47 more
HELP = {"-h", "--help", "--version"}


def main(argv: Sequence[str] | None = None) -> int:
    before = signal.signal(signal.SIGINT, _interrupted)  # what is imported may catch a KeyboardInterrupt
    # When one rank ends before the others, torch's store would print 30 lines of C++ frames on each of the others.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    _open_closed_streams()
    _choose_temporary_folder()
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


def _choose_temporary_folder() -> None:
    """Python does without a TMPDIR that is not there, torch's shared memory does not. Unix sockets have short names."""
    if (name := next(filter(os.environ.get, ("TMPDIR", "TEMP", "TMP")), None)) is None:
        return
    with contextlib.suppress(OSError):
        usable = tempfile.gettempdir()
        if len(os.fsencode(usable)) > SOCKETS and os.access("/tmp", os.W_OK):
            usable = "/tmp"
        given = os.environ[name]
        if usable != os.path.abspath(given) and os.environ.get("LOCAL_RANK", "0") == "0":
            why = f"cannot be written to, or is longer than {SOCKETS} bytes"
            print(f"{name}: {given} {why}; temporary files are in {usable}", file=sys.stderr, flush=True)
        os.environ["TMPDIR"] = tempfile.tempdir = usable


def _open_closed_streams() -> None:
    """Standard streams that were closed are /dev/null here and in the processes that are started."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115  it takes the stream's own descriptor
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def _interrupted(_number: int, _frame: Any) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)
