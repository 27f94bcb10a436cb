"""Per-token policy losses: clipped surrogate with dual clip, KL estimators, and their sum. Any shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dynamo_megatron.algorithm.arrays import torch_function
from dynamo_megatron.config import PolicyLossConfig

__all__ = ["PolicyLoss", "PolicyLossConfig", "clipped_policy_loss", "kl_estimate", "policy_loss_terms"]

# The published loss has these bounds of log ratios and of the k3 estimate. Beyond a bound there is no gradient.
MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0
# |d| has the slope +-1 down to d = 0, where the sign would be that of a rounding error. Below this (nats) it is smooth.
ABS_ROUNDING = 1e-3


class PolicyLoss(NamedTuple):
    loss: torch.Tensor  # per token
    # bool: the loss (with cispo its weight) was decided by the clip to [1 - low, 1 + high] or by the log ratio's bound
    clipped: torch.Tensor
    clipped_dual: torch.Tensor  # bool: the loss was decided by the dual clip


class PolicyLossTerms(NamedTuple):
    loss: torch.Tensor  # per token: policy loss + kl_coef kl - entropy_coef entropy
    clipped: torch.Tensor
    clipped_dual: torch.Tensor
    kl: torch.Tensor | None  # nats per token; None without reference logprobs


@torch_function
def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float | None = None,
) -> PolicyLoss:
    """PPO's clipped loss per token (arXiv 1707.06347), with the dual clip of arXiv 1912.09729.

    With r = exp(logprobs - old_logprobs): max(-A r, -A clip(r, 1 - low, 1 + high)), and where A < 0 at most -A c (None:
    no dual clip). Arrays of one shape, natural log; differentiable in `logprobs`. log r is clamped to [-20, 20]; a
    token above 20 counts as clipped unless its advantage is 0. Raises ValueError for a clip_ratio_c of 1 or less.
    """
    if clip_ratio_c is not None and not clip_ratio_c > 1:
        raise ValueError(f"clip_ratio_c: {clip_ratio_c} must be above 1 (None turns the dual clip off)")
    log_ratios = logprobs - old_logprobs
    ratio = torch.exp(log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    loss = torch.maximum(plain, bounded)
    clipped = (bounded > plain) | ((log_ratios > MAX_LOG_RATIO) & (advantages != 0))
    if clip_ratio_c is None:
        return PolicyLoss(loss, clipped, torch.zeros_like(clipped))
    ceiling = -advantages * clip_ratio_c
    clipped_dual = (advantages < 0) & (loss > ceiling)
    held = torch.where(advantages < 0, torch.minimum(loss, ceiling), loss)
    return PolicyLoss(held, clipped & ~clipped_dual, clipped_dual)


@torch_function
def response_log_ratios(
    log_ratios: Tensor,
    lengths: Tensor,
    ratio: Literal["sequence", "sequence_mean"],
    add_up: Callable[[torch.Tensor], object] | None = None,
) -> Tensor:
    """The log ratio of each token's response, float [n], no gradient: the sum over its tokens, or their mean.

    log_ratios: float [n], nats, through the responses of `lengths` (int [S], tokens) in order. `sequence`: a response
    is one action (arXiv 2402.14740). `sequence_mean`: GSPO's (arXiv 2507.18071, Eq. 7). `add_up`: if ranks hold parts
    of each response, it adds up float64 [2, S] (sums, token counts) over them, in place.
    """
    if len(lengths) == 0:  # segment_reduce does not accept it
        return log_ratios.detach()
    # segment_reduce adds in a fixed order on every device, which an index_add on CUDA would not; `unsafe`: the host
    # does not wait for the lengths to check them.
    sums = torch.segment_reduce(log_ratios.detach().double(), "sum", lengths=lengths, initial=0, unsafe=True)
    totals = torch.stack([sums, lengths.double()])
    if add_up is not None:
        add_up(totals)
    sums, counts = totals
    values = sums if ratio == "sequence" else sums / counts.clamp(min=1)
    return values.to(log_ratios.dtype).repeat_interleave(lengths, output_size=len(log_ratios))


@torch_function
def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: Literal["k1", "k2", "k3", "abs"]) -> Tensor:
    """Estimate of KL(policy || reference) per token in nats from sampled tokens (joschu.net/blog/kl-approx.html).

    With d = logprobs - ref_logprobs: `k1` d; `abs` |d|; `k2` d^2 / 2; `k3` exp(-d) + d - 1, bounded as published
    (|d| <= 20, k3 <= 10). Differentiable. Raises ValueError for an unknown kind.
    """
    difference = logprobs - ref_logprobs
    match kind:
        case "k1":
            return difference
        case "abs":
            return difference.abs()
        case "k2":
            return 0.5 * difference.square()
        case "k3":
            inverse = (-difference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            return (inverse.exp() - inverse - 1).clamp(-MAX_K3, MAX_K3)
    raise ValueError(f"kind: {kind!r} is unknown; one of k1, k2, k3, abs")


def policy_loss_terms(
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    ref_logprobs: torch.Tensor | None,
    config: PolicyLossConfig,
    old_kl_coef: torch.Tensor | None = None,
    log_ratios: torch.Tensor | None = None,
) -> PolicyLossTerms:
    """The whole loss per token from advantages that are modulated already; differentiable in `logprobs` and `entropy`.

    Float tensors of one shape, nats. `old_kl_coef`: the coefficient of each token's |d|, d = logprobs - old_logprobs
    (KL-Cov, arXiv 2505.22617). `log_ratios`: for d in the policy loss, the log ratio of the token's response; its
    gradient is that of the token's own logprob (GSPO-token, arXiv 2507.18071, Eq. 14). `kind: cispo` is
    -A sg(clip(r, 1 - low, 1 + high)) logprob (arXiv 2506.13585, Eq. 4). A term with coefficient 0 is left out, so that
    it cannot bring in a NaN. Raises ValueError if kl_coef is not 0 and reference logprobs are missing.
    """
    own = logprobs - old_logprobs
    drift = own if log_ratios is None else log_ratios + (logprobs - logprobs.detach())  # log_ratios with own's gradient
    low, high = config.clip_ratio_low, config.clip_ratio_high
    if config.kind == "cispo":
        ratio = torch.exp(drift.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
        weight = ratio.clamp(1 - low, 1 + high)
        loss, clipped = -advantages * weight * logprobs, (weight != ratio) & (advantages != 0)
        clipped_dual = torch.zeros_like(clipped)
    else:
        clips = {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": config.clip_ratio_c}
        loss, clipped, clipped_dual = clipped_policy_loss(drift, torch.zeros_like(drift), advantages, **clips)
    kl = None if ref_logprobs is None else kl_estimate(logprobs, ref_logprobs, config.kl_kind)
    if config.kl_coef:
        if kl is None:
            raise ValueError("ref_logprobs: kl_coef is not 0, so the reference model's logprobs are needed")
        loss = loss + config.kl_coef * kl
    if config.entropy_coef:
        loss = loss - config.entropy_coef * entropy
    if old_kl_coef is not None:
        loss = loss + old_kl_coef * ((own.square() + ABS_ROUNDING**2).sqrt() - ABS_ROUNDING)
    return PolicyLossTerms(loss, clipped, clipped_dual, kl)
