"""Launches the Triton kernels: the functions of `reference` for one chunk of logits, with the same contract."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from dynamo_megatron.algorithm.modulation import ModulationRanges
from dynamo_megatron.config import ModulationConfig, PolicyLossConfig
from dynamo_megatron.kernels.triton_kernels import SUMS, gradient_kernel, merge_kernel, statistics_kernel
from dynamo_megatron.kernels.types import METRICS, Shard, Statistics, Terms, Tokens

# Columns or tokens at once, and warps: no spills and at most 64 registers on sm_80, sm_90 and sm_100.
STATISTICS_BLOCK, STATISTICS_WARPS = 4096, 16
GRADIENT_BLOCK, GRADIENT_WARPS = 2048, 4
MERGE_BLOCK, MERGE_WARPS = 128, 4
# The kernels write tl.fma where they mean it: results do not depend on a Triton version's default. The barrier before
# an in-place store orders loads only as long as none is pipelined: num_stages 1.
OPTIONS = {"enable_fp_fusion": False, "num_stages": 1}
INTERPRETED = not isinstance(merge_kernel, triton.runtime.JITFunction)


def workspace_buffers(operand: torch.dtype, device: torch.device) -> int:
    """Returns how many [c, V/tp] tensors of the compute dtype are alive at once: the logits and, on a CPU, the float32
    copy that a GEMM makes of a bfloat16 gradient."""
    return 1 if device.type == "cuda" or operand != torch.bfloat16 else 2


def operand_dtype(hidden: torch.dtype, weight: torch.dtype, compute: torch.dtype) -> torch.dtype:
    """Returns the dtype of the GEMMs' operands: bfloat16 where both tensors have it; the logits' gradient is then
    rounded to it too."""
    return torch.bfloat16 if hidden == weight == torch.bfloat16 else compute


def shard_statistics_(logits: Tensor, labels: Tensor, shard: Shard, temperature: float) -> tuple[Tensor, None]:
    """As `reference.shard_statistics_`; the logits stay as they are, and nothing is subtracted (None)."""
    n = len(logits)
    part = logits.new_empty(6, n)
    sizes = (n, shard.rows, shard.columns, shard.start, logits.stride(0))
    options = {"TEMPERATURE": temperature, "BLOCK": STATISTICS_BLOCK, "num_warps": STATISTICS_WARPS, **OPTIONS}
    statistics_kernel[(n,)](logits, labels, part, *sizes, **options)
    return part, None


def _merge(parts: Tensor, temperature: float, tokens: Tokens, config: PolicyLossConfig, ranges, sums, out) -> None:
    shards, _, n = parts.shape
    m = config.modulation or ModulationConfig()  # without ranges it is not used
    modulation = {"ALPHA": m.alpha, "LAMBDA_MIN": m.lambda_min, "GAMMA": m.gamma, "TAU": m.tau}
    clips = {"LOW": config.clip_ratio_low, "HIGH": config.clip_ratio_high, "CEILING": config.clip_ratio_c}
    terms = {"KL_COEF": config.kl_coef, "KL_KIND": config.kl_kind, "ENTROPY_COEF": config.entropy_coef}
    options = {"TEMPERATURE": temperature, "BLOCK": MERGE_BLOCK, "num_warps": MERGE_WARPS, **OPTIONS}
    merge_kernel[(triton.cdiv(n, MERGE_BLOCK),)](
        *(parts, out, n, out.stride(0), shards),
        *(*tokens, *(ranges or (None, None, None)), sums),
        **{"KIND": config.kind, **clips, **terms, **modulation, **options},
    )


def merge(parts: Tensor, temperature: float, out: Tensor | None = None) -> Statistics:
    """As `reference.merge`."""
    out = parts.new_empty(parts.shape[1:]) if out is None else out
    _merge(parts, temperature, Tokens(None, None, None), PolicyLossConfig(), None, None, out)
    return Statistics(*out)


def merge_with_loss(
    parts: Tensor,
    temperature: float,
    config: PolicyLossConfig,
    tokens: Tokens,
    ranges: ModulationRanges | None,
    out: Tensor | None = None,
) -> tuple[Statistics, Terms]:
    """As `reference.merge_with_loss`, in one launch and a sum; needs ranges, as tensors, where there is modulation."""
    assert config.modulation is None or ranges is not None
    _, rows, n = parts.shape
    out = parts.new_empty(rows + 3, n) if out is None else out
    sums = parts.new_empty(triton.cdiv(n, MERGE_BLOCK), SUMS.value)
    _merge(parts, temperature, tokens, config, config.modulation and ranges, sums, out)
    return Statistics(*out[:rows]), Terms(*out[rows:], sums[:, : len(METRICS)].sum(0))


def logits_gradient_(
    logits: Tensor,
    labels: Tensor,
    shard: Shard,
    maximum: Tensor,
    log_sum: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    temperature: float,
    operand: torch.dtype,
) -> Tensor:
    """As `reference.logits_gradient_`; a bfloat16 result lies in the first half of each row's bytes."""
    gradient = logits.view(operand)
    rows = (labels, maximum, log_sum, entropy, grad_logprobs, grad_entropy)
    sizes = (shard.rows, shard.columns, shard.start, logits.stride(0), gradient.stride(0))
    options = {"TEMPERATURE": temperature, "BLOCK": GRADIENT_BLOCK, "num_warps": GRADIENT_WARPS, **OPTIONS}
    gradient_kernel[(len(logits),)](logits, gradient, *rows, *sizes, **options)
    return gradient[:, : shard.rows]
