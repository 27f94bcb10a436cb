"""The two kernels of the policy head that go over the logits, a few times at the size of a chunk, for ncu.

python -P benchmarks/head_kernels.py [TOKENS COLUMNS]
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from dynamo_megatron.kernels import triton_backend
from dynamo_megatron.kernels.types import Shard, Statistics

TEMPERATURE = 0.7


def chunk(tokens: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor, Shard, Statistics]:
    """Random float32 logits [tokens, columns], labels, the whole vocabulary as one shard, and its statistics."""
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(tokens, columns, generator=generator, device=device)
    labels = torch.randint(columns, (tokens,), generator=generator, device=device)
    shard = Shard(0, columns, columns)
    part, _ = triton_backend.shard_statistics_(logits, labels, shard, TEMPERATURE)
    return logits, labels, shard, triton_backend.merge(part[None], TEMPERATURE)


def in_place(logits: Tensor, labels: Tensor, shard: Shard, stats: Statistics, g: Tensor, g_h: Tensor | None) -> Tensor:
    """bfloat16 gradient in the logits' own bytes."""
    return triton_backend.logits_gradient_(
        logits, labels, shard, stats.maximum, stats.log_sum, stats.entropy, g, g_h, TEMPERATURE, torch.bfloat16
    )


if __name__ == "__main__":
    size = [int(word) for word in sys.argv[1:]] or [4096, 152064]
    for _ in range(3):
        logits, *row = chunk(*size, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        in_place(logits, *row, torch.randn_like(row[-1].logprobs), None)
