"""How many of the weights that a push would send change in one step of real updates, and what a lossless delta costs.

    python -P benchmarks/weight_delta.py RUN [RUN ...] --lr 1e-6 RECORDED [--steps 3] [--out benchmarks/results]

RUN: the folder of a run whose recorded rollouts are trained on again from its model (the first steps whose rewards
differ), on one rank, in bfloat16 with float32 main weights; run it where the run was started. `--lr`: learning rates,
RECORDED for the run's own. Each is measured twice: `fresh`, from the model's own weights, whose main weights lie on
bfloat16 values, so that a small step rounds back to them; and `settled`, where every main weight starts anywhere within
its rounding interval, as it does after many steps.

Writes weight_delta.json with, for every step: `changed`, the share of values that differ; `bits`, per value of the
model, of an ideal coder of the differences of the bit patterns (order-0 entropy), of a bitmap and the changed values,
and of a list of 4-byte indices and the changed values. A plain push is 16 bits a value.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from dynamo_megatron.policy import backend

backend.enable_cpu()
backend.define_router_gemm()
backend.fix_torch_adam_checkpoints()

import torch  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves this folder out
from measure import machine  # noqa: E402

from dynamo_megatron.config import Config  # noqa: E402
from dynamo_megatron.config.files import compose  # noqa: E402
from dynamo_megatron.models import load_model_config  # noqa: E402
from dynamo_megatron.policy.batch import TrainBatch  # noqa: E402
from dynamo_megatron.policy.layout import Layout, join_ranks  # noqa: E402
from dynamo_megatron.policy.policy import Policy  # noqa: E402
from dynamo_megatron.rollout.store import read_groups, step_file  # noqa: E402
from dynamo_megatron.runtime.coordination import connect_store  # noqa: E402
from dynamo_megatron.types import RolloutBatch  # noqa: E402


def step_batch(run: Path, step: int, config: Config) -> TrainBatch:
    """The step's recorded rollouts, with baselines from their groups alone in each step."""
    groups = [group for of_prompt in read_groups(step_file(run, step)).values() for group in of_prompt]
    rollouts = [r for group in sorted(groups, key=lambda g: g[0].group_id) for r in group if r.status == "ok"]
    return TrainBatch.build(RolloutBatch.from_rollouts(rollouts), config)


@torch.no_grad()
def settle(policy: Policy) -> None:
    """Moves every main weight to a random place within the interval that rounds to its bfloat16 value."""
    generator = torch.Generator().manual_seed(0)
    for group in policy.optimizer.param_groups:
        for main in group["params"]:
            spacing = torch.exp2(torch.frexp(main).exponent.float() - 8)  # bfloat16 has 8 significant bits
            noise = torch.rand(main.shape, generator=generator) - 0.5
            moved = main + 0.999 * noise * spacing
            main.copy_(torch.where(moved.bfloat16() == main, moved, main))


def bit_patterns(policy: Policy) -> np.ndarray:
    """int32 [values]: the pushed bfloat16 values, as integers in the order of the numbers."""
    values = torch.cat([p.detach().flatten() for chunk in policy.chunks for p in chunk.parameters()]).bfloat16()
    bits = values.view(torch.int16).numpy().astype(np.int32)
    return np.where(bits < 0, -(bits & 0x7FFF), bits)


def delta(before: np.ndarray, after: np.ndarray) -> dict[str, Any]:
    difference = after - before
    changed = float(np.count_nonzero(difference) / len(difference))
    counts = np.unique(difference, return_counts=True)[1] / len(difference)
    moved = np.abs(difference[difference != 0])
    return {
        "changed": changed,
        "of the changed, by one bfloat16 step": float((moved == 1).mean()) if len(moved) else 0.0,
        "bits": {
            "plain": 16.0,
            "ideal": float(-(counts * np.log2(counts)).sum()),
            "bitmap and values": 1 + 16 * changed,
            "indices and values": 48 * changed,
        },
    }


def measured(run: Path, lr: float | None, settled: bool, steps: int, layout: Layout | None) -> tuple[dict, Layout]:
    keys = [
        "model.dtype=bfloat16",
        "parallel.tp=1",
        "parallel.pp=1",
        f"rollout.recorded={run}",
        "rollout.engine=recorded",
    ]
    keys += [f"output_dir={tempfile.gettempdir()}/weight-delta", "eval.every=null", "optimizer.warmup_steps=0"]
    config = compose([str(run / "config.yaml")], keys)[0]
    lr = config.optimizer.lr if lr is None else lr
    layout = layout or join_ranks(config, connect_store(60))
    policy = Policy(load_model_config(config.model.path), config, layout)
    if settled:
        settle(policy)
    before, rows = bit_patterns(policy), []
    first = before
    batches = ((step, step_batch(run, step, config)) for step in range(1, config.trainer.steps + 1))
    for step, batch in itertools.islice(((n, b) for n, b in batches if b.advantages.any()), steps):
        mini_batches = policy.pack(batch.rollouts, batch.mini_batches)
        stats = policy.token_stats(batch.rollouts, mini_batches)
        updates = [policy.update(batch, mini, stats, None, lr) for mini in mini_batches]
        after = bit_patterns(policy)
        rows.append({"step": step, "updates": len(updates), **delta(before, after)})
        print(f"{run.name} lr {lr:g} {'settled' if settled else 'fresh'}: {rows[-1]}", flush=True)
        before = after
    return {
        "run": run.name,
        "lr": lr,
        "start": "settled" if settled else "fresh",
        "values": len(before),
        "steps": rows,
        "over all steps": delta(first, before),
    }, layout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--lr", nargs="+", default=["RECORDED"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})
    results, layout = [], None
    for run in arguments.runs:
        for lr in arguments.lr:
            for settled in (False, True):
                rate = None if lr == "RECORDED" else float(lr)
                result, layout = measured(run, rate, settled, arguments.steps, layout)
                results.append(result)
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / "weight_delta.json"
    file.write_text(json.dumps({"machine": machine(("torch", "megatron-core")), "results": results}, indent=1) + "\n")
    print(file)


if __name__ == "__main__":
    main()
