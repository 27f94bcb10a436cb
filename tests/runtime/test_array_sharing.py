"""What rank 0 shares with the other ranks of its node and of others: all of it, through one memory of a node."""

import json
import multiprocessing
import os
from pathlib import Path

import numpy as np

from dynamo_megatron.runtime.array_sharing import concatenate, receive, send

LOCAL_RANKS = [0, 1, 0]  # of ranks of a node of two and a node of one


def test_a_node_has_one_copy(run_script, tmp_path):
    case = {"local_ranks": LOCAL_RANKS, "out": str(tmp_path / "out")}
    run_script(Path(__file__).with_name("array_sharing_runs.py"), case, tmp_path, 240)
    seen = [json.loads((tmp_path / "out" / f"rank{rank}.json").read_text()) for rank in range(len(LOCAL_RANKS))]
    assert [(r["node"], r["leaders"]) for r in seen] == [([0, 1], [0, 2]), ([0, 1], None), ([2], [0, 2])]
    for rank in seen:
        assert rank["open"] == 0 and rank["stop"] == "SIGTERM"
        assert rank["memory"].startswith("p ") and "/memfd:dynamo-megatron-" in rank["memory"]
    assert seen[0]["memory"] == seen[1]["memory"] != seen[2]["memory"]


def test_joined_arrays_are_sent_without_a_copy():
    here, there = multiprocessing.Pipe()
    parts = [np.arange(i, i + 100_001) for i in range(3)]
    before = len(os.listdir("/proc/self/fd"))
    joined, pairs = concatenate(parts), concatenate([np.ones((2, 2)), np.zeros((1, 2))])
    assert (joined == np.concatenate(parts)).all() and pairs.shape == (3, 2)
    send(there, (joined, pairs, joined[1:], joined[:-1]))
    received = receive(here)
    assert (received[0] == joined).all() and (received[1] == pairs).all() and (received[2] == joined[1:]).all()
    assert (received[3] == joined[:-1]).all(), "a part of an array is another array"
    joined[0] = 9
    assert received[0][0] == 9, "one memory"
    there.close()
    del joined, received
    assert len(os.listdir("/proc/self/fd")) == before - 1, "the memory goes with the arrays"
