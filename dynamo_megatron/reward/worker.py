"""A reward worker: `python -P -m dynamo_megatron.reward.worker FD PARENT_PID`, started by the pool.

Over the socket FD it gets the functions' names, answers ("ready",) or ("failed", message), and from then on answers
each (prompt, response) with ("parts", {name: value}) or ("error", function, "Type: text (file, line N)", frames). It
ends with the socket.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

from dynamo_megatron.log_files import never_fail
from dynamo_megatron.records import Prompt
from dynamo_megatron.reward.functions import checked, load_function
from dynamo_megatron.user_code import failure

PR_SET_PDEATHSIG = 1
SIGNALS_LEFT_TO_THE_PARENT = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        # The end of the socket is not enough: a function that never returns never reads.
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def main(descriptor: int, parent: int) -> None:
    _die_with(parent)
    never_fail()
    for number in SIGNALS_LEFT_TO_THE_PARENT:
        # A handler, not SIG_IGN: programs that a reward function runs would inherit that.
        signal.signal(number, lambda *_: None)
    os.set_inheritable(descriptor, False)  # a forked grandchild must not keep the socket open
    connection = Connection(descriptor)
    try:
        names = connection.recv()
        try:
            functions = {name: load_function(name) for name in names}
        except ValueError as error:
            connection.send(("failed", str(error)))
            return
        connection.send(("ready",))
        while True:
            prompt, response = connection.recv()
            connection.send(_score(functions, prompt, response))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _score(functions: dict[str, Callable], prompt: Prompt, response: str) -> tuple:
    parts = {}
    for name, function in functions.items():
        try:
            parts[name] = checked(function(prompt, response))
        except (Exception, SystemExit) as error:  # the user's function may raise anything; the parent decides
            return ("error", name, *failure(error))
    return ("parts", parts)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
