"""What the host pays for one layer of a micro-batch: operators, copies, autograd nodes, and milliseconds of 28 layers
that are too small for their arithmetic to take time. Ours beside transformers' layer of the same shape.

    python -P benchmarks/launches.py [--label NAME]

Counts are those of a model of 4 layers less those of one of 2, halved, from torch's profiler on the CPU: leaf operators
(those that call no other), copies and casts among them, numbers that the host reads (`aten::_local_scalar_dense`), and
autograd nodes of the forward pass. Seconds are the median of `ROUNDS` micro-batches, ours and transformers' in turns.
Writes benchmarks/results/launches.json under `--label`; other labels stay, so that two versions can be compared.
"""

from __future__ import annotations

import argparse
import collections
import json
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
from measure import machine
from torch.profiler import ProfilerActivity, profile

from dynamo_megatron.config import Config
from dynamo_megatron.models import load_model_config
from dynamo_megatron.policy.backend import enable_cpu
from dynamo_megatron.policy.layout import join_ranks
from dynamo_megatron.policy.policy import Policy
from dynamo_megatron.types import Sequences

RESULTS = Path(__file__).parent / "results" / "launches.json"
SHAPE = {"family": "qwen2", "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "vocab": 256, "tied": True}
TOKENS, ROUNDS = 16, 30
COPIES = ("aten::copy_", "aten::clone", "aten::contiguous", "aten::index", "aten::cat")
LayerCounts = dict[str, float]


def model(folder: Path, layers: int) -> Path:
    tool = Path(__file__).parents[1] / "tools" / "tiny_model.py"
    return runpy.run_path(str(tool))["make_tiny_model"](folder / f"layers-{layers}", layers=layers, **SHAPE)


def config_of(path: Path) -> Config:
    return Config(
        model={"path": str(path), "dtype": "float32"}, data={"source": "problems.jsonl"}, output_dir=str(path / "run")
    )


def ours(path: Path, layout: Any) -> Callable[[], torch.Tensor]:
    """The forward pass of a policy's chunk over one packed sequence."""
    policy = Policy(load_model_config(path), config_of(path), layout)
    sequences = Sequences(["p0"], np.arange(TOKENS + 1), np.array([0, TOKENS + 1]), np.array([TOKENS // 2]))
    (mini,) = policy.pack(sequences, [np.arange(1)])
    (micro_batch,) = mini.micro_batches
    return lambda: policy.ddp[0].module.forward_packed(micro_batch)


def theirs(path: Path) -> Callable[[], torch.Tensor]:
    from transformers import AutoModel

    network = AutoModel.from_pretrained(path, attn_implementation="sdpa", dtype=torch.float32)
    tokens = (torch.arange(TOKENS) % SHAPE["vocab"])[None]

    def run() -> torch.Tensor:
        with torch._C.DisableTorchFunction():  # without the stand-in for CUDA that the policy has on a CPU
            return network(tokens, use_cache=False).last_hidden_state

    return run


def forward(run: Callable[[], torch.Tensor]) -> None:
    with torch.no_grad():
        run()


def both(run: Callable[[], torch.Tensor]) -> None:
    torch.autograd.backward(run().sum())


def nodes(output: torch.Tensor) -> int:
    """Autograd nodes that the output's graph has."""
    seen, waiting = set(), [output.grad_fn]
    while waiting:
        if (node := waiting.pop()) is not None and node not in seen:
            seen.add(node)
            waiting += [after for after, _ in node.next_functions]
    return len(seen)


def counts(run: Callable[[], torch.Tensor]) -> dict[str, LayerCounts]:
    found = {}
    for name, work in (("forward without gradients", forward), ("forward and backward", both)):
        work(run)
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            work(run)
        leaves: collections.Counter = collections.Counter()
        for event in trace.events():
            if not event.cpu_children and event.name.startswith("aten::"):
                leaves[event.name] += 1
        found[name] = {
            "leaf operators": leaves.total(),
            "copies": sum(leaves[copy] for copy in COPIES),
            "read by the host": leaves["aten::_local_scalar_dense"],
        }
    found["forward and backward"]["autograd nodes"] = nodes(run())
    return found


def per_layer(two: dict[str, LayerCounts], four: dict[str, LayerCounts]) -> dict[str, LayerCounts]:
    return {name: {key: (four[name][key] - two[name][key]) / 2 for key in of} for name, of in two.items()}


def milliseconds(runs: dict[str, Callable[[], torch.Tensor]]) -> dict[str, dict[str, float]]:
    times = collections.defaultdict(list)
    for _ in range(ROUNDS):
        for who, run in runs.items():
            for name, work in (("forward without gradients", forward), ("forward and backward", both)):
                begin = time.perf_counter()
                work(run)
                times[name, who].append(1e3 * (time.perf_counter() - begin))
    found = collections.defaultdict(dict)
    for (name, who), values in times.items():
        found[name][who] = statistics.median(values)
    return {name: {**of, "ratio": of["ours"] / of["transformers"]} for name, of in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--label", default="now")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        paths = {layers: model(folder, layers) for layers in (2, 4, 28)}
        transformers_runs = {layers: theirs(path) for layers, path in paths.items()}
        found: dict[str, Any] = {"machine": machine(("torch", "megatron-core", "transformers"))}
        found["transformers, a layer"] = per_layer(counts(transformers_runs[2]), counts(transformers_runs[4]))
        enable_cpu()
        layout = join_ranks(config_of(paths[2]), dist.HashStore())
        found["ours, a layer"] = per_layer(counts(ours(paths[2], layout)), counts(ours(paths[4], layout)))
        runs = {"transformers": transformers_runs[28], "ours": ours(paths[28], layout)}
        found["milliseconds, 28 layers"] = milliseconds(runs)
    print(json.dumps(found, indent=1))
    before = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps({**before, options.label: found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
