"""What rank 0 shares with the other ranks of its node and of others: all of it, through one memory of a node."""

import json
import multiprocessing
import os
from pathlib import Path

import numpy as np

from dynamo_megatron.runtime.array_sharing import receive, send

LARGE = 2 * 586 * 4096  # bytes of the two arrays that are apart from the message, on pages
LOCAL_RANKS = [0, 1, 0]  # of ranks of a node of two and a node of one


def test_a_node_has_one_copy_and_tensors_go_between_nodes(run_script, tmp_path):
    case = {"local_ranks": LOCAL_RANKS, "out": str(tmp_path / "out")}
    run_script(Path(__file__).with_name("array_sharing_runs.py"), case, tmp_path, 240)
    seen = [json.loads((tmp_path / "out" / f"rank{rank}.json").read_text()) for rank in range(len(LOCAL_RANKS))]
    assert [(r["first"], r["leaders"]) for r in seen] == [(0, [0, 2]), (0, None), (2, [0, 2])]
    assert [r["tensors"] for r in seen] == [LARGE, 0, LARGE]
    for rank in seen:
        assert rank["message"] < 30_000 and rank["open"] == 0 and rank["stop"] == "SIGTERM"
        assert rank["memory"].startswith("p ") and "/memfd:dynamo-megatron-" in rank["memory"]
    assert seen[0]["memory"] == seen[1]["memory"] != seen[2]["memory"]


def test_large_arrays_are_not_part_of_a_message():
    here, there = multiprocessing.Pipe()
    numbers, few = np.arange(300_001), np.ones((2, 2))
    before = len(os.listdir("/proc/self/fd"))
    send(there, (numbers, few, numbers[1:], np.asfortranarray(numbers[1:].reshape(600, 500))))  # a pipe holds 64 KiB
    received = receive(here)
    assert (received[0] == numbers).all() and (received[1] == few).all() and (received[2] == numbers[1:]).all()
    assert (received[3].ravel() == numbers[1:]).all()
    received[0][:] = 9
    assert numbers[0] == 0 and received[2][0] == 1, "each is memory of its own"
    del received
    assert len(os.listdir("/proc/self/fd")) == before, "the memory goes with the arrays"
