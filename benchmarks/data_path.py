"""From a step's last reply to the first micro-batch on the last rank: rank 0's batch as a pickled broadcast and shared.

    python -P benchmarks/data_path.py [--rollouts 8192] [--tokens 4096] [--ranks 2] [--rounds 3] [--label now]

It needs no model and no server: a process has the rollouts of a step as the rollout process has them (a batch of one
for each), joins them and sends the batch to rank 0 when it is told to. Rank 0 then gives it to the other ranks of the
node in turns by `dist.broadcast_object_list` ("pickled") and by `array_sharing.share` ("shared"), and every rank checks
its tokens, plans, and packs its first micro-batch. Seconds are of rounds in which no memory is measured. Bytes are the
proportional set sizes (a page that several processes map counts once) of all ranks and the rollout process, from one
more round of either; the memory that was taken for the batch beforehand counts once it is used. Writes
benchmarks/results/data_path.json with machine and versions under `--label`: what other labels have found stays in the
file.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import socket
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from dynamo_megatron.runtime.arena import Arena, receive, send
from dynamo_megatron.types import RolloutBatch

RESULTS = Path(__file__).parent / "results" / "data_path.json"
PACKAGES = ["torch", "numpy", "megatron-core"]
WAYS = ("pickled", "shared")
PROMPT_TOKENS = 128
VOCABULARY = 150_000
MICRO_BATCH_TOKENS = 16384
SETTLE = 0.5  # seconds of samples before a round whose memory is measured


def one_rollout(number: int, tokens: int, rng: np.random.Generator) -> RolloutBatch:
    response = tokens - PROMPT_TOKENS
    return RolloutBatch(
        prompt_ids=[f"problem-{number // 16}"],
        tokens=rng.integers(0, VOCABULARY, tokens),
        offsets=np.array([0, tokens]),
        prompt_lengths=np.array([PROMPT_TOKENS]),
        rollout_ids=[f"000001-{number // 16:04d}-{number % 16:03d}"],
        group_ids=[f"000001-{number // 16:04d}"],
        engine_logprobs=-rng.random(response, np.float32),
        rewards=np.array([float(number % 2)]),
        successes=np.array([number % 2 == 0]),
        weight_versions=np.zeros(response, np.int32),
        finish_reasons=["stop"],
        servers=["server-0"],
    )


def rollout_process(connection: Connection, rollouts: int, tokens: int) -> None:
    """Joins and sends a step's rollouts each time that it is told to, in memory that it took before."""
    rng = np.random.default_rng(0)
    batches = [one_rollout(number, tokens, rng) for number in range(rollouts)]
    while connection.recv():
        arena = Arena()
        arena.grow(sum(batch.nbytes for batch in batches) + (1 << 20))
        connection.send("ready")
        connection.recv()
        send(connection, RolloutBatch.join(batches, arena.concatenate))
        del arena


def run_rank(rank: int, port: int, options: argparse.Namespace, results: Any, sampling: Any) -> None:
    """`results`: a queue, for the pids of rank 0 and its rollout process, and for rank 0's times; `sampling`: an event,
    set while memory is to be measured."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(options.ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(options.ranks)}
    from dynamo_megatron.policy import backend

    backend.enable_cpu()
    import torch.distributed as dist

    from dynamo_megatron.config import Config
    from dynamo_megatron.policy.layout import join_ranks
    from dynamo_megatron.runtime.coordination import connect_store

    connection = None
    if rank == 0:
        context = multiprocessing.get_context("spawn")
        connection, child_end = context.Pipe()
        child = context.Process(target=rollout_process, args=(child_end, options.rollouts, options.tokens))
        child.start()
        results.put(child.pid)
    config = Config(model={"path": "none"}, data={"source": "none"}, output_dir="none")
    layout = join_ranks(config, connect_store(300))
    rounds = [(way, measured) for measured in [False] * (options.rounds + 1) + [True] for way in WAYS]
    for way, measured in rounds:
        if rank == 0:
            connection.send(True)
            connection.recv()
            if measured:
                sampling.set()
                time.sleep(SETTLE)
        dist.barrier(group=layout.host)
        times = layout.gather(one_round(way, layout, connection))
        gc.collect()
        if rank == 0:
            sampling.clear()
            start, received = times[0][:2]
            end = {"start": start, "end": max(t[3] for t in times), "way": way, "measured": measured}
            parts = {"to rank 0": received - start, "to the last rank": times[-1][2] - received}
            results.put(end | {"parts": parts | {"to its micro-batch": times[-1][3] - times[-1][2]}})
    if rank == 0:
        connection.send(False)
        child.join()
        results.put(None)
    dist.barrier(group=layout.host)


def one_round(way: str, layout: Any, connection: Connection | None) -> tuple[float, float, float, float]:
    """When rank 0 asked for the batch, and when a rank had it from the rollout process (0 but on rank 0), had it from
    rank 0, and had packed its first micro-batch: by the clock that all processes share."""
    import torch.distributed as dist

    from dynamo_megatron.policy.batch import MicroBatch, SequenceCost, assign_micro_batches
    from dynamo_megatron.runtime.array_sharing import share

    batch, start, received = None, time.monotonic(), 0.0
    if connection is not None:
        connection.send(True)
        batch, received = receive(connection), time.monotonic()
    if way == "pickled":
        box = [batch]
        dist.broadcast_object_list(box, src=0, group=layout.host)
        batch = box[0]
    else:
        batch = share(batch, layout)
    shared = time.monotonic()
    batch.check_tokens(VOCABULARY)
    lengths = (np.diff(batch.offsets) - 1).tolist()
    assigned = assign_micro_batches(lengths, layout.dp.size(), MICRO_BATCH_TOKENS, cost=SequenceCost(1.0, 0.0))
    MicroBatch.pack(batch, assigned[layout.dp.rank()][0], multiple=1, device=layout.device)
    return start, received, shared, time.monotonic()


def proportional_bytes(pid: int) -> int:
    """The process's proportional set size; 0 where it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    results, sampling = context.Queue(), context.Event()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        context.Process(target=run_rank, args=(rank, port, options, results, sampling)) for rank in range(options.ranks)
    ]
    for rank in ranks:
        rank.start()
    pids = [rank.pid for rank in ranks]
    samples: list[tuple[float, int]] = []  # when, bytes
    rounds: list[dict[str, Any]] = []
    while True:
        if sampling.is_set():
            samples.append((time.monotonic(), sum(map(proportional_bytes, pids))))
        if any(rank.exitcode for rank in ranks):
            sys.exit(f"exit codes of the ranks: {[rank.exitcode for rank in ranks]}")
        if results.empty():
            time.sleep(0.005)
        elif (said := results.get()) is None:
            break
        elif isinstance(said, int):
            pids.append(said)
        else:
            rounds.append(said)
    for rank in ranks:
        rank.join()
    return {way: figures([r for r in rounds if r["way"] == way], samples) for way in WAYS}


def figures(rounds: list[dict[str, Any]], samples: list[tuple[float, int]]) -> dict[str, Any]:
    """Of one way's rounds, the first of which warms up and the last of which has samples of memory."""
    timed, last = rounds[1:-1], rounds[-1]
    before = [size for when, size in samples if last["start"] - SETTLE < when < last["start"]]
    during = [size for when, size in samples if last["start"] <= when <= last["end"]]
    return {
        "seconds": statistics.median(r["end"] - r["start"] for r in timed),
        "seconds of each round": [r["end"] - r["start"] for r in timed],
        "seconds by part": {part: statistics.median(r["parts"][part] for r in timed) for part in last["parts"]},
        "bytes before": statistics.median(before),
        "peak bytes": max(during),
        "samples": len(during),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=4096, help="of a prompt and its response")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="timed ones of either way; one more comes first")
    parser.add_argument("--label", default="now")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves this folder out
    from measure import keep, machine  # imports torch, which the rollout process does not

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    described = machine(PACKAGES)
    asked = {name: getattr(options, name) for name in ("rollouts", "tokens", "ranks", "rounds")}
    found = asked | measure(options)
    keep(options.out, options.label, {"machine": described, **found})


if __name__ == "__main__":
    main()
