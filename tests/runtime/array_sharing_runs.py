"""Run by test_array_sharing.py: ranks of several nodes, which are simulated, get values of rank 0.

    python -P array_sharing_runs.py CASE.json

It imports Megatron once and forks the ranks; each writes what it saw to OUT/rankN.json.
"""

import json
import multiprocessing
import os
import sys
from pathlib import Path

from dynamo_megatron.policy import backend

backend.enable_cpu()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from dynamo_megatron.config import Config  # noqa: E402
from dynamo_megatron.policy.layout import join_ranks  # noqa: E402
from dynamo_megatron.runtime.array_sharing import concatenate, receive, send, share  # noqa: E402
from dynamo_megatron.runtime.coordination import Coordinator, StopFlag, StopRequested, connect_store  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1] / "policy"))
from forked_ranks import fork_ranks, wait_for  # noqa: E402

NUMBERS = np.arange(300_000)
VALUE = {"large": NUMBERS, "transposed": np.asfortranarray(NUMBERS.reshape(600, 500)), "few": NUMBERS[:5], "text": "a"}


def value() -> dict:
    """As the rollout process has sent it: the large array is in memory of its own."""
    here, there = multiprocessing.Pipe()
    send(there, VALUE | {"large": concatenate([NUMBERS[:1000], NUMBERS[1000:]])})
    return receive(here)


def memory_of(array: np.ndarray) -> str:
    """The mapping that an array's bytes lie in: whether others see what is written, its "inode" and its file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, access, _, _, inode, *name = line.split(maxsplit=5)
        first, last = (int(end, 16) for end in place.split("-"))
        if first <= array.ctypes.data < last:
            return f"{access[3]} {inode} {' '.join(name)}"
    raise AssertionError("no such memory")


def share_a_value(layout, found: dict) -> None:
    own = value() if layout.rank == 0 else None
    got = share(own, layout)
    found["memory"] = memory_of(got["large"])
    assert got.keys() == VALUE.keys() and all(np.array_equal(got[name], VALUE[name]) for name in VALUE)
    got["large"][layout.rank :: 100] = -1 - layout.rank  # each rank writes to pages of its own
    dist.barrier(group=layout.host)
    mine = NUMBERS.copy()
    mine[layout.rank :: 100] = -1 - layout.rank
    assert (got["large"] == mine).all() and (own is None or (own["large"] == NUMBERS).all())
    del got, own
    found["open"] = len([f for f in Path("/proc/self/fd").iterdir() if "memfd" in os.path.realpath(f)])


def stop_on_rank_0(coordinator: Coordinator, layout) -> str:
    def stop():
        raise StopRequested("SIGTERM")

    try:
        return coordinator.on_rank_0("a stop", stop, layout)
    except StopRequested as stopped:
        return str(stopped)


def run(case: dict) -> None:
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_RANK"] = str(case["local_ranks"][rank])
    torch.set_num_threads(1)
    store = connect_store(60)
    layout = join_ranks(Config(model={"path": "none"}, data={"source": "none"}, output_dir="none"), store)
    found: dict = {"node": dist.get_process_group_ranks(layout.node), "leaders": None}
    if layout.leaders is not None:
        found["leaders"] = dist.get_process_group_ranks(layout.leaders)
    share_a_value(layout, found)
    coordinator = Coordinator(store, rank, StopFlag())
    found["stop"] = stop_on_rank_0(coordinator, layout)
    coordinator.close()
    dist.barrier(group=layout.host)
    (Path(case["out"]) / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    case = json.loads(Path(sys.argv[1]).read_text())
    out = Path(case["out"])
    out.mkdir()
    wait_for(fork_ranks(len(case["local_ranks"]), lambda: run(case), out), out)
