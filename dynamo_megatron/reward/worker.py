"""A reward worker: `python -P -m dynamo_megatron.reward.worker FD`, started by the pool through `subreaper`.

Over the socket FD it gets the functions' names and the section `reward`, answers ("ready",) or ("failed", message), and
from then on answers each (prompt, response) with ("parts", {name: value}, *steps) or ("error", function, "Type: text
(file, line N)", frames); a step is (start, end, reward). It ends with the socket.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

from dynamo_megatron.reward.functions import checked_steps, load_function
from dynamo_megatron.runtime.log_files import never_fail
from dynamo_megatron.runtime.process_signals import FOR_THE_RANKS
from dynamo_megatron.runtime.user_code import failure
from dynamo_megatron.types import Prompt


def main(descriptor: int) -> None:
    never_fail()  # the user's function may print responses
    for number in FOR_THE_RANKS:
        # A handler, not SIG_IGN: programs that a reward function runs would inherit that.
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FOR_THE_RANKS)  # or nothing could end those programs by one
    os.set_inheritable(descriptor, False)  # a forked grandchild must not keep the socket open
    connection = Connection(descriptor)
    try:
        names, config = connection.recv()
        try:
            functions = {name: load_function(name, config) for name in names}
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
    parts, steps = {}, []
    for name, function in functions.items():
        try:
            parts[name], more = checked_steps(function(prompt, response), len(response))
            steps += more
        except (Exception, SystemExit) as error:  # the user's function may raise anything; the parent decides
            return ("error", name, *failure(error))
    return ("parts", parts, *steps)


if __name__ == "__main__":
    main(int(sys.argv[1]))
