"""What the host pays for a layer of a micro-batch, ours beside transformers' of the same shape.

    python -P benchmarks/launches.py [--label NAME]

Operators, copies, numbers that the host reads and autograd nodes are those of a model of 4 layers less those of one of
2, halved (torch's profiler on a CPU; operators that call no other). Milliseconds are the median of a model of 28 layers
that are too small for their arithmetic to take time, ours and transformers' in turns. Writes
benchmarks/results/launches.json under `--label`; other labels stay, so that two versions can be compared.
"""

from __future__ import annotations

import argparse
import collections
import os
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import numpy as np
import torch
import torch.distributed as dist
from measure import keep, machine
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModel

from dynamo_megatron.config import Config
from dynamo_megatron.models import load_model_config
from dynamo_megatron.policy.backend import enable_cpu
from dynamo_megatron.policy.layout import join_ranks
from dynamo_megatron.policy.policy import Policy
from dynamo_megatron.types import Sequences

RESULTS = Path(__file__).parent / "results" / "launches.json"
TINY_MODEL = Path(__file__).parents[1] / "tools" / "tiny_model.py"
SHAPE = {"family": "qwen2", "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "vocab": 256, "tied": True}
TOKENS, ROUNDS = 16, 30
COPIES = ("aten::copy_", "aten::clone", "aten::contiguous", "aten::index", "aten::cat")
Run = Callable[[], torch.Tensor]


def config_of(path: Path) -> Config:
    model = {"path": str(path), "dtype": "float32"}
    return Config(model=model, data={"source": "problems.jsonl"}, output_dir=str(path / "run"))


def ours(path: Path, layout: Any) -> Run:
    """The forward pass of a policy's chunk over one packed sequence."""
    policy = Policy(load_model_config(path), config_of(path), layout)
    sequences = Sequences(["p0"], np.arange(TOKENS + 1), np.array([0, TOKENS + 1]), np.array([TOKENS // 2]))
    (micro_batch,) = policy.pack(sequences, [np.arange(1)])[0].micro_batches
    return lambda: policy.ddp[0].module.forward_packed(micro_batch)


def theirs(path: Path) -> Run:
    network = AutoModel.from_pretrained(path, attn_implementation="sdpa", dtype=torch.float32)
    tokens = torch.arange(TOKENS)[None]

    def run() -> torch.Tensor:
        with torch._C.DisableTorchFunction():  # without the stand-in for CUDA that the policy has on a CPU
            return network(tokens, use_cache=False).last_hidden_state

    return run


def forward(run: Run) -> None:
    with torch.no_grad():
        run()


def both(run: Run) -> None:
    torch.autograd.backward(run().sum())


WORK = {"forward without gradients": forward, "forward and backward": both}


def counts(run: Run) -> collections.Counter:
    found: collections.Counter = collections.Counter()
    for name, work in WORK.items():
        work(run)
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            work(run)
        leaves = collections.Counter(e.name for e in trace.events() if not e.cpu_children and e.name[:6] == "aten::")
        found[f"{name}: operators"] = leaves.total()
        found[f"{name}: copies"] = sum(leaves[copy] for copy in COPIES)
        found[f"{name}: read by the host"] = leaves["aten::_local_scalar_dense"]
    seen, waiting = set(), [run().grad_fn]
    while waiting:
        if (node := waiting.pop()) is not None and node not in seen:
            seen.add(node)
            waiting += [after for after, _ in node.next_functions]
    found["autograd nodes"] = len(seen)
    return found


def of_a_layer(two: Run, four: Run) -> dict[str, float]:
    few, many = counts(two), counts(four)
    return {name: (many[name] - few[name]) / 2 for name in many}


def milliseconds(runs: dict[str, Run]) -> dict[str, dict[str, float]]:
    times = collections.defaultdict(list)
    for _ in range(ROUNDS):
        for who, run in runs.items():
            for name, work in WORK.items():
                begin = time.perf_counter()
                work(run)
                times[name, who].append(1e3 * (time.perf_counter() - begin))
    medians = {name: {who: statistics.median(times[name, who]) for who in runs} for name in WORK}
    return {name: {**of, "ratio": of["ours"] / of["transformers"]} for name, of in medians.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--label", default="now")
    label = parser.parse_args().label
    torch.set_num_threads(1)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    make = runpy.run_path(str(TINY_MODEL))["make_tiny_model"]
    with tempfile.TemporaryDirectory() as scratch:
        paths = {n: make(Path(scratch) / str(n), layers=n, **SHAPE) for n in (2, 4, 28)}
        peers = {n: theirs(path) for n, path in paths.items()}
        found: dict[str, Any] = {"machine": machine(("torch", "megatron-core", "transformers"))}
        found["transformers, a layer"] = of_a_layer(peers[2], peers[4])
        enable_cpu()
        layout = join_ranks(config_of(paths[2]), dist.HashStore())
        found["ours, a layer"] = of_a_layer(ours(paths[2], layout), ours(paths[4], layout))
        found["milliseconds, 28 layers"] = milliseconds({"transformers": peers[28], "ours": ours(paths[28], layout)})
    keep(RESULTS, label, found)


if __name__ == "__main__":
    main()
