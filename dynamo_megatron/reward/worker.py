"""A reward worker: `python -P -m dynamo_megatron.reward.worker FD`, started by the pool through `guard`.

Over the socket FD it gets the functions' names and the section `reward`, and answers ("ready",) or ("failed", message),
then each (prompt, response) with one `FunctionResult` per function, each as soon as it is computed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

from dynamo_megatron.reward.extraction import Graded
from dynamo_megatron.reward.functions import FunctionResult, checked_steps, load_function
from dynamo_megatron.runtime.log_files import print_printable
from dynamo_megatron.runtime.process_signals import FOR_THE_RANKS
from dynamo_megatron.runtime.user_code import failure
from dynamo_megatron.types import Prompt


def main(descriptor: int) -> None:
    print_printable()  # the user's function may print responses
    for number in FOR_THE_RANKS:
        # A handler, not SIG_IGN: programs that a reward function starts would inherit SIG_IGN.
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FOR_THE_RANKS)  # else these signals could not end those programs
    os.set_inheritable(descriptor, False)  # a program that a function starts must not keep the socket open
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
            for name, function in functions.items():
                connection.send(_result(name, function, prompt, response))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _result(name: str, function: Callable, prompt: Prompt, response: str) -> FunctionResult:
    state = "crashed"
    try:
        value = function(prompt, response)
        state = "wrong_format"
        score, steps = checked_steps(value, len(response))
        answer = value.answer if isinstance(value, Graded) else None
        return FunctionResult(name, "scored", score, steps, answer=answer)
    except BaseException as error:  # the user's function may raise anything; the parent decides
        text, frames = failure(error)
        return FunctionResult(name, state, text=text, frames=frames)


if __name__ == "__main__":
    main(int(sys.argv[1]))
