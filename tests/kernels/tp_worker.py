"""One rank of a tensor-parallel group over gloo; leaves FOLDER/rank-RANK.pt.

`tp_worker.py RANK SIZE FOLDER BACKEND [CASE ...]`; with backend triton in Triton's interpreter.
"""

import sys
from datetime import timedelta

import plain_head as plain
import torch
import torch.distributed as dist

from dynamo_megatron.algorithm.modulation import ModulationRanges
from dynamo_megatron.config import ModulationConfig, PolicyLossConfig
from dynamo_megatron.kernels import policy_loss

MODULATION = ModulationConfig(alpha=0.3, gamma=10.0, tau=0.5)
CONFIG = PolicyLossConfig(0.2, 0.28, 1.3, MODULATION, kl_coef=0.05, entropy_coef=0.02)
RANGES = ModulationRanges(0.3, 3.0, 0.2)
# name: (case, gradient, chunk_tokens). Of two shards with 20 rows, a vocabulary of 18 leaves one all padding.
CASES = {
    "eager": ({}, "eager", 7),
    "recompute": ({}, "recompute", 7),
    "empty_shard": ({"vocab": 18}, "eager", None),
    "empty_shard_recompute": ({"vocab": 18}, "recompute", None),
    "blocked_shard": ({"dtype": torch.float32, "blocked": range(20)}, "eager", None),
    "blocked_shard_recompute": ({"dtype": torch.float32, "blocked": range(20)}, "recompute", 7),
    "float32": ({"dtype": torch.float32}, "eager", 5),
    "bfloat16": ({"dtype": torch.bfloat16}, "recompute", 5),
    "no_rows": ({"tokens": 0}, "eager", 7),
    "no_labels": ({}, "recompute", 7),
    "one_row": ({"tokens": 1}, "eager", 7),
}


def main(rank: int, size: int, folder: str, backend: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    results = {}
    for name in names or CASES:
        arguments, gradient, chunk_tokens = CASES[name]
        c = plain.case(**arguments)
        if name == "no_labels":
            c.labels[:] = plain.IGNORE
        hidden = c.hidden.clone().requires_grad_()
        weight = c.weight.chunk(size)[rank].clone().requires_grad_()
        out = policy_loss(
            hidden,
            weight,
            c.labels,
            c.advantages,
            c.old,
            c.weights,
            CONFIG,
            ref_logprobs=c.ref,
            ranges=RANGES if gradient == "eager" else None,
            vocab_size=c.vocab,
            tp_group=dist.group.WORLD,
            backend=backend,
            gradient=gradient,
            chunk_tokens=chunk_tokens,
        )
        out.loss.backward()
        results[name] = {
            "same": [out.loss.detach(), *out.stats, out.advantages, *out.metrics.values(), hidden.grad],
            "weight_grad": weight.grad,
        }
    torch.save(results, f"{folder}/rank-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5:])
