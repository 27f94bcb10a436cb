import multiprocessing
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

from dynamo_megatron.rollout.shipping import APART, receive, send

SENDER = """
import sys, numpy as np
from multiprocessing.connection import Connection
from dynamo_megatron.rollout.shipping import send
tokens = np.arange(300_001)
send(Connection(int(sys.argv[1])), ("done", {"tokens": tokens, "few": tokens[:5], "flags": tokens % 3 == 0}, [tokens]))
"""


def test_arrays_of_another_process_come_whole_and_writable():
    here, there = multiprocessing.Pipe()
    command = [sys.executable, "-P", "-c", SENDER, str(there.fileno())]
    with subprocess.Popen(command, pass_fds=[there.fileno()]) as sender:
        there.close()
        before = len(os.listdir("/proc/self/fd"))
        kind, arrays, (again,) = receive(here)
        assert sender.wait(20) == 0
    expected = np.arange(300_001)
    assert kind == "done" and expected.nbytes > APART
    assert (arrays["tokens"] == expected).all() and (arrays["flags"] == (expected % 3 == 0)).all()
    assert arrays["few"].tolist() == [0, 1, 2, 3, 4] and (again == expected).all()
    arrays["tokens"][0] = 7
    assert arrays["tokens"][0] == 7
    with pytest.raises(EOFError):
        receive(here)
    del arrays, again
    assert len(os.listdir("/proc/self/fd")) == before, "the memory goes with the arrays"


def test_a_sender_that_ends_within_a_message_is_an_end():
    here, there = multiprocessing.Pipe()
    there.send((pickle.dumps(None), [APART]))
    there.close()
    with pytest.raises((EOFError, OSError)):
        receive(here)


def test_what_is_small_takes_no_memory_of_its_own():
    here, there = multiprocessing.Pipe()
    send(there, ("beat", 3, np.ones(10)))
    head, sizes = here.recv()
    assert sizes == [] and pickle.loads(head)[:2] == ("beat", 3)
