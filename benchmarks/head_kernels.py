"""The policy head's Triton kernels by themselves: bytes a second against a measured copy, and the in-place gradient
against the one that writes elsewhere.

Only a GPU can show a race of the in-place kernel: Triton's interpreter runs one program after another.
"""

from __future__ import annotations

from typing import Any

import torch
from measure import interleaved
from torch import Tensor

from dynamo_megatron.algorithm.modulation import ModulationRanges
from dynamo_megatron.config import ModulationConfig, PolicyLossConfig
from dynamo_megatron.kernels import triton_backend
from dynamo_megatron.kernels.triton_kernels import gradient_kernel
from dynamo_megatron.kernels.types import Shard, Statistics, Tokens

SHAPES = ((4096, 152064), (8192, 76032), (8192, 19072))  # tokens of a chunk, columns
TINY_SHAPES = ((8, 272),)
REPEATS = 1000
REPEATED_SHAPE = (1024, 152064)
FLUSH_BYTES = 256 << 20  # more than any L2 cache: what a small kernel reads comes from memory, as in training
TEMPERATURE = 0.7
TINY = {"warm_up": 0, "rounds": (2, 2)}


def chunk(tokens: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor, Shard, Statistics]:
    """Random float32 logits [tokens, columns], labels, the whole vocabulary as one shard, and its statistics."""
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(tokens, columns, generator=generator, device=device)
    labels = torch.randint(columns, (tokens,), generator=generator, device=device)
    shard = Shard(0, columns, columns)
    part, _ = triton_backend.shard_statistics_(logits, labels, shard, TEMPERATURE)
    return logits, labels, shard, triton_backend.merge(part[None], TEMPERATURE)


def speeds(tokens: int, columns: int, device: torch.device, rounds: dict[str, Any]) -> list[dict[str, Any]]:
    """Seconds of each kernel, and for those that stream the logits their bytes a second, also as a share of a copy's.

    A copy reads and writes every byte; statistics read them; the gradient reads them and writes half as many.
    """
    logits, labels, shard, stats = chunk(tokens, columns, device)
    work, other = logits.clone(), torch.empty_like(logits)
    part, _ = triton_backend.shard_statistics_(logits, labels, shard, TEMPERATURE)
    random = torch.randn_like(stats.logprobs)
    constants = Tokens(random, random.abs(), stats.logprobs + 0.1 * random)
    loss = PolicyLossConfig(modulation=ModulationConfig())
    ranges = ModulationRanges(*torch.tensor([0.0, 12.0, 1.0], device=device))
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def before() -> None:
        work.copy_(logits)
        flush.zero_()

    calls = {
        "copy": lambda: other.copy_(logits),
        "statistics": lambda: triton_backend.shard_statistics_(logits, labels, shard, TEMPERATURE),
        "merge and loss": lambda: triton_backend.merge_with_loss(part[None], TEMPERATURE, loss, constants, ranges),
        "gradient": lambda: in_place(work, labels, shard, stats, random, None),
        "gradient with entropy": lambda: in_place(work, labels, shard, stats, random, random),
    }
    calls["gradient"](), before(), calls["gradient with entropy"]()  # the kernels compile outside the rounds
    moved = {"copy": 8, "statistics": 4, "gradient": 6, "gradient with entropy": 6}  # bytes a logit
    times = interleaved(calls, device, before=before, **rounds)
    rates = {name: count * logits.numel() / times[name]["median"] for name, count in moved.items()}
    return [
        {
            "kernel": name,
            "tokens": tokens,
            "columns": columns,
            "seconds": seconds,
            "GB/s": rates[name] / 1e9 if name in rates else None,
            "of copy": rates[name] / rates["copy"] if name in rates else None,
        }
        for name, seconds in times.items()
    ]


def in_place(logits: Tensor, labels: Tensor, shard: Shard, stats: Statistics, g: Tensor, g_h: Tensor | None) -> Tensor:
    """bfloat16 gradient in the logits' own bytes."""
    return triton_backend.logits_gradient_(
        logits, labels, shard, stats.maximum, stats.log_sum, stats.entropy, g, g_h, TEMPERATURE, torch.bfloat16
    )


def out_of_place(
    logits: Tensor, labels: Tensor, shard: Shard, stats: Statistics, g: Tensor, g_h: Tensor | None
) -> Tensor:
    """The same launch of the same kernel, with a buffer of its own for the result."""
    gradient = torch.empty_like(logits, dtype=torch.bfloat16)
    gradient_kernel[(len(logits),)](
        logits,
        gradient,
        labels,
        stats.maximum,
        stats.log_sum,
        stats.entropy,
        g,
        g_h,
        shard.rows,
        shard.columns,
        shard.start,
        logits.stride(0),
        gradient.stride(0),
        TEMPERATURE=TEMPERATURE,
        BLOCK=triton_backend.GRADIENT_BLOCK,
        num_warps=triton_backend.GRADIENT_WARPS,
        **triton_backend.OPTIONS,
    )
    return gradient


def different_bits(tokens: int, columns: int, repeats: int, device: torch.device) -> dict[str, int]:
    """How many of `repeats` in-place gradients differ anywhere from the one that was written elsewhere."""
    logits, labels, shard, stats = chunk(tokens, columns, device)
    g = torch.randn_like(stats.logprobs)
    found: dict[str, int] = {}
    for name, g_h in (("gradient", None), ("gradient with entropy", g.flip(0))):
        expected = out_of_place(logits, labels, shard, stats, g, g_h).view(torch.int16)
        assert expected.any(), "a gradient of zeros proves nothing"
        wrong = torch.zeros((), dtype=torch.int64, device=device)
        work = torch.empty_like(logits)
        for _ in range(repeats):
            work.copy_(logits)
            wrong += (in_place(work, labels, shard, stats, g, g_h).view(torch.int16) != expected).any()
        found[name] = int(wrong)
    return found


def kernel_figures(device: torch.device, *, tiny: bool) -> dict[str, Any]:
    """All of this file's figures."""
    shapes, rounds = (TINY_SHAPES, TINY) if tiny else (SHAPES, {})
    repeated, repeats = (TINY_SHAPES[0], 2) if tiny else (REPEATED_SHAPE, REPEATS)
    return {
        "speed": [row for shape in shapes for row in speeds(*shape, device, rounds)],
        "in place": {
            "tokens": repeated[0],
            "columns": repeated[1],
            "repeats": repeats,
            "different": different_bits(*repeated, repeats, device),
        },
    }
