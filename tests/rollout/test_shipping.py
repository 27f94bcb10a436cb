import multiprocessing
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

from dynamo_megatron.rollout.shipping import receive, send
from dynamo_megatron.runtime import arena as arena_module
from dynamo_megatron.runtime.arena import APART, Arena

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
    there.send((pickle.dumps(None), [(0, APART)]))
    there.close()
    with pytest.raises((EOFError, OSError)):
        receive(here)


def test_what_is_small_takes_no_memory_of_its_own():
    here, there = multiprocessing.Pipe()
    send(there, ("beat", 3, np.ones(10)))
    head, places = here.recv()
    assert places == [] and pickle.loads(head)[:2] == ("beat", 3)


@pytest.mark.parametrize("grown", [0, 3_000_000, 9_000_000])
def test_what_was_joined_in_an_arena_is_sent_without_a_copy(monkeypatch, grown):
    here, there = multiprocessing.Pipe()
    parts = [np.arange(i, i + 100_001) for i in range(3)]
    before = len(os.listdir("/proc/self/fd"))
    arena = Arena()
    arena.grow(grown)
    joined, pairs, halves = map(arena.concatenate, (parts, [np.ones((2, 2)), np.zeros((1, 2))], [parts[0] / 2] * 2))
    del arena
    assert (joined == np.concatenate(parts)).all() and joined.dtype == np.int64 and pairs.shape == (3, 2)
    monkeypatch.setattr(arena_module, "Arena", None)
    send(there, [joined, pairs, halves])
    monkeypatch.undo()
    received = receive(here)
    assert (received[0] == joined).all() and (received[1] == pairs).all() and (received[2] == halves).all()
    joined[0] = 9
    assert received[0][0] == 9, "one memory"
    for part in (joined[1:], joined[:-1]):
        send(there, part)
        assert (receive(here) == part).all(), "a part of it is another array"
    del part, joined, halves, received
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_arena_has_its_memory_before_it_is_used():
    arena = Arena()
    arena.grow(5_000_000)
    arena.grow(3_000_000)
    before = os.fstat(arena.descriptor).st_blocks * 512
    arena.concatenate([np.ones(1_000_000)])
    assert os.fstat(arena.descriptor).st_blocks * 512 == before >= 8_000_000
