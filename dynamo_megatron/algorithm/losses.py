"""Per-token policy losses: clipped surrogate with dual clip, KL estimators, and their sum. Any shape."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from dynamo_megatron.algorithm.arrays import Array, torch_function
from dynamo_megatron.config import PolicyLossConfig

__all__ = [
    "PolicyLoss",
    "PolicyLossConfig",
    "PolicyLossTerms",
    "clipped_policy_loss",
    "kl_estimate",
    "policy_loss_terms",
]

# The published loss bounds log-ratios and the k3 estimate so; a bound that acts stops the gradient.
MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0
# |d| has the slope 1 down to d = 0, where it would follow the sign of a rounding error; below this (nats) it is round.
ABS_ROUNDING = 1e-3


class PolicyLoss(NamedTuple):
    loss: torch.Tensor  # per token
    clipped: torch.Tensor  # bool: the clip to [1 - low, 1 + high] decided the loss
    clipped_dual: torch.Tensor  # bool: the dual clip did


class PolicyLossTerms(NamedTuple):
    loss: torch.Tensor  # per token: policy loss + kl_coef kl - entropy_coef entropy
    clipped: torch.Tensor
    clipped_dual: torch.Tensor
    kl: torch.Tensor | None  # nats per token; None without reference logprobs


@torch_function
def clipped_policy_loss(
    logprobs: Array,
    old_logprobs: Array,
    advantages: Array,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float | None = None,
) -> PolicyLoss:
    """PPO's clipped loss per token (arXiv 1707.06347), with the dual clip of arXiv 1912.09729.

    With r = exp(logprobs - old_logprobs): max(-A r, -A clip(r, 1 - low, 1 + high)), and where A < 0 at most -A c.
    Arrays of one shape, natural log; differentiable in `logprobs`. `clip_ratio_c` None turns the dual clip off.

    Raises ValueError for a clip_ratio_c that is not above 1.
    """
    if clip_ratio_c is not None and not clip_ratio_c > 1:
        raise ValueError(f"clip_ratio_c: {clip_ratio_c} must be above 1 (None turns the dual clip off)")
    ratio = torch.exp((logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    loss = torch.maximum(plain, bounded)
    clipped = bounded > plain
    if clip_ratio_c is None:
        return PolicyLoss(loss, clipped, torch.zeros_like(clipped))
    ceiling = -advantages * clip_ratio_c
    clipped_dual = (advantages < 0) & (loss > ceiling)
    return PolicyLoss(torch.where(advantages < 0, torch.minimum(loss, ceiling), loss), clipped, clipped_dual)


@torch_function
def kl_estimate(logprobs: Array, ref_logprobs: Array, kind: Literal["k1", "k2", "k3", "abs"]) -> Array:
    """Estimate of KL(policy || reference) per token in nats from sampled tokens (joschu.net/blog/kl-approx.html).

    With d = logprobs - ref_logprobs: `k1` d; `abs` |d|; `k2` d^2 / 2; `k3` exp(-d) + d - 1, bounded as published
    (|d| <= 20, k3 <= 10). Differentiable. Raises ValueError for an unknown kind.
    """
    difference = logprobs - ref_logprobs
    if kind == "k1":
        return difference
    if kind == "abs":
        return difference.abs()
    if kind == "k2":
        return 0.5 * difference.square()
    if kind == "k3":
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
) -> PolicyLossTerms:
    """The whole loss per token from advantages that are modulated already; differentiable in `logprobs` and `entropy`.

    Float tensors of one shape, nats. `old_kl_coef`: the coefficient of each token's |d|, d = logprobs - old_logprobs,
    computed as sqrt(d^2 + 1e-6) - 1e-3 (KL-Cov, arXiv 2505.22617). A term with coefficient 0 is left out, so that it
    cannot bring in a NaN.
    Raises ValueError where kl_coef is set and reference logprobs are missing.
    """
    loss, clipped, clipped_dual = clipped_policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        clip_ratio_low=config.clip_ratio_low,
        clip_ratio_high=config.clip_ratio_high,
        clip_ratio_c=config.clip_ratio_c,
    )
    if ref_logprobs is None and config.kl_coef:
        raise ValueError("ref_logprobs: kl_coef is not 0, so the reference model's logprobs are needed")
    kl = None if ref_logprobs is None else kl_estimate(logprobs, ref_logprobs, config.kl_kind)
    if config.kl_coef:
        loss = loss + config.kl_coef * kl
    if config.entropy_coef:
        loss = loss - config.entropy_coef * entropy
    if old_kl_coef is not None:
        drift = (logprobs - old_logprobs).square() + ABS_ROUNDING**2
        loss = loss + old_kl_coef * (drift.sqrt() - ABS_ROUNDING)
    return PolicyLossTerms(loss, clipped, clipped_dual, kl)
