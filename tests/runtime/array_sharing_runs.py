"""Run by test_array_sharing.py: ranks of one node, or of several that are simulated, get values of rank 0.

    python -P array_sharing_runs.py CASES.json

It imports Megatron once and forks the ranks of one case after the other; each writes what it saw to OUT/rankN.json.
"""

import contextlib
import json
import multiprocessing
import os
import pickle
import signal
import sys
import time
from dataclasses import fields, is_dataclass
from pathlib import Path
from unittest import mock

from dynamo_megatron.policy import backend

backend.enable_cpu()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from dynamo_megatron.config import Config  # noqa: E402
from dynamo_megatron.policy.layout import join_ranks  # noqa: E402
from dynamo_megatron.rollout.shipping import receive, send  # noqa: E402
from dynamo_megatron.runtime.arena import Arena  # noqa: E402
from dynamo_megatron.runtime.array_sharing import share  # noqa: E402
from dynamo_megatron.runtime.coordination import Coordinator, StopFlag, StopRequested, connect_store  # noqa: E402
from dynamo_megatron.types import Rollout, RolloutBatch  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1] / "policy"))
from forked_ranks import fork_ranks, wait_for  # noqa: E402


def batch(rollouts: int, response: int, concatenate=np.concatenate) -> RolloutBatch:
    """With tokens of 8 bytes and logprobs of 4 for each of `response` and a few tokens of every rollout."""
    if rollouts == 0:
        return RolloutBatch.from_rollouts([])
    parts = []
    for i in range(rollouts):
        prompt, rng = 2 + i % 3, np.random.default_rng(i)
        tokens, mask = rng.integers(0, 1000, prompt + response).tolist(), [0] * prompt + [1] * response
        name, spans = f"g{i // 2}-{i}", [(3, 0, response)]
        logprobs = rng.normal(size=response).tolist()
        parts.append(Rollout(name, name[:2], f"p{i}", 1, tokens, mask, logprobs, spans, "stop", i / 7, i % 2 == 0, {}))
    return RolloutBatch.join([RolloutBatch.from_rollouts([part]) for part in parts], concatenate)


def other_values() -> dict:
    numbers = np.arange(300_000)
    return {
        "fortran": np.asfortranarray(numbers.reshape(600, 500)),
        "every second": numbers[::2],
        "flags": np.resize(numbers % 3 == 0, 2_000_000),
        "twice": [numbers, numbers],
        "none": None,
        "few": np.zeros((0, 2), np.float32),
        "text": "a text",
    }


LARGE = (60, 5000)  # rollouts, response tokens: tokens and logprobs are more than arena.APART
VALUES = {
    "large": lambda: batch(*LARGE),
    "small": lambda: batch(3, 5),
    "empty": lambda: batch(0, 0),
    "others": other_values,
}


def differences(got, expected, name: str = "") -> list[str]:
    if is_dataclass(expected):
        got, expected = ({f.name: getattr(x, f.name) for f in fields(expected)} for x in (got, expected))
    if isinstance(expected, list):
        got, expected = dict(enumerate(got)), dict(enumerate(expected))
    if isinstance(expected, dict):
        parts = [differences(got[key], value, f"{name}.{key}") for key, value in expected.items()]
        return [difference for part in parts for difference in part]
    if not isinstance(expected, np.ndarray) or not isinstance(got, np.ndarray):
        return [] if got == expected else [name]
    same = got.dtype == expected.dtype and got.shape == expected.shape and (got == expected).all()
    return [] if same and got.flags.writeable else [name]


def memory_of(array: np.ndarray) -> str:
    """The mapping that an array's bytes lie in: its file and "inode", and whether others see what is written."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, access, _, _, inode, *name = line.split(maxsplit=5)
        first, last = (int(end, 16) for end in place.split("-"))
        if first <= array.ctypes.data < last:
            return f"{access[3]} {inode} {' '.join(name) if name and 'memfd' in name[0] else ''}"
    raise AssertionError("no such memory")


def open_files() -> list[str]:
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # of the listing itself
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return links


def as_of_the_rollout_process() -> RolloutBatch:
    """`large` as it is when the rollout process has sent it."""
    here, there = multiprocessing.Pipe()
    send(there, batch(*LARGE, Arena().concatenate))
    return receive(here)


def shared_values(layout, found: dict) -> None:
    messages, tensors = [], []
    objects, broadcast = dist.broadcast_object_list, dist.broadcast

    def counted_objects(box, **options):
        objects(box, **options)
        messages.append(len(pickle.dumps(box)))

    def counted_tensor(tensor, **options):
        tensors.append(tensor.nbytes)
        broadcast(tensor, **options)

    for name, make in VALUES.items():
        value = None
        if layout.rank == 0:
            value = as_of_the_rollout_process() if name == "large" else make()
        messages.clear()
        tensors.clear()
        with mock.patch.multiple(dist, broadcast_object_list=counted_objects, broadcast=counted_tensor):
            got = share(value, layout)
        found[name] = {"wrong": differences(got, make()), "message": max(messages), "tensors": sum(tensors)}
        if name == "large":
            found["memory"] = [memory_of(got.tokens), memory_of(got.engine_logprobs)]
            if layout.rank == 0:
                found["memory of the value"] = [memory_of(value.tokens), memory_of(value.engine_logprobs)]
            found["after a write"] = after_a_write(layout, value, got)
        del value, got


def after_a_write(layout, value: RolloutBatch | None, got: RolloutBatch) -> list[str]:
    """What is wrong where every rank has written to its own array."""
    expected = batch(*LARGE)
    got.tokens[layout.rank :: 100] = -1 - layout.rank
    dist.barrier(group=layout.host)
    mine = expected.tokens.copy()
    mine[layout.rank :: 100] = -1 - layout.rank
    wrong = [] if (got.tokens == mine).all() else ["its own"]
    return wrong if value is None else wrong + differences(value, expected)


def through_a_coordinator(layout, coordinator: Coordinator) -> dict:
    def stop():
        raise StopRequested("SIGTERM")

    large = coordinator.on_rank_0("a value", VALUES["large"], layout)
    try:
        said = coordinator.on_rank_0("a stop", stop, layout)
    except StopRequested as stopped:
        said = f"stopped by {stopped}"
    return {"wrong": differences(large, batch(*LARGE)), "said": said}


def outlive_rank_0(layout, case: dict) -> dict:
    """Rank 0 is killed after it has shared a value; what another rank then has."""
    pids = layout.gather(os.getpid())
    got = share(as_of_the_rollout_process() if layout.rank == 0 else None, layout)
    dist.barrier(group=layout.host)
    if layout.rank == 0:
        time.sleep(1.0)  # the others are out of the barrier
        os.kill(os.getpid(), signal.SIGKILL)
    while Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.02)
    return {"wrong": differences(got, batch(*LARGE)), "memory": memory_of(got.tokens)}


def run(case: dict) -> None:
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_RANK"] = str(case["local_ranks"][rank])
    torch.set_num_threads(1)
    config = Config(model={"path": "none"}, data={"source": "none"}, output_dir="none")
    store = connect_store(60)
    layout = join_ranks(config, store)
    found: dict = {"node": dist.get_process_group_ranks(layout.node), "leaders": None}
    if layout.leaders is not None:
        found["leaders"] = dist.get_process_group_ranks(layout.leaders)
    if case["killed"]:
        found |= outlive_rank_0(layout, case)
    else:
        refused = mock.patch.object(os, "open", side_effect=PermissionError) if rank in case["refused"] else None
        with refused or contextlib.nullcontext():
            shared_values(layout, found)
        found["left open"] = [link for link in open_files() if "memfd" in link]
        coordinator = Coordinator(store, rank, StopFlag())
        found["coordinator"] = through_a_coordinator(layout, coordinator)
        coordinator.close()
        dist.barrier(group=layout.host)
    (Path(case["out"]) / f"rank{rank}.json").write_text(json.dumps(found))


def main(cases_file: str) -> None:
    for case in json.loads(Path(cases_file).read_text()):
        out = Path(case["out"])
        out.mkdir()
        pids = fork_ranks(len(case["local_ranks"]), lambda case=case: run(case), out)
        if case["killed"]:
            assert os.waitstatus_to_exitcode(os.waitpid(pids[1], 0)[1]) == 0, (out / "rank1.log").read_text()[-3000:]
            os.waitpid(pids[0], 0)
        else:
            wait_for(pids, out)


if __name__ == "__main__":
    main(sys.argv[1])
