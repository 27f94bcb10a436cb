"""Token-level advantage modulation by entropy and by the predicted entropy change (DynaMO, arXiv 2602.19208)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dynamo_megatron.algorithm.arrays import torch_function
from dynamo_megatron.config import ModulationConfig

__all__ = ["Modulated", "ModulationConfig", "ModulationRanges", "entropy_change", "modulate", "modulation_ranges"]

EPS = 1e-8


class ModulationRanges(NamedTuple):
    """Scalars over the response tokens of the caller's scope; nats. Without tokens inf, -inf, -inf, which have no
    effect in a reduction over ranks by min, max, max."""

    entropy_min: torch.Tensor | float
    entropy_max: torch.Tensor | float
    entropy_change_max: torch.Tensor | float


class Modulated(NamedTuple):
    """Per token, without gradient: advantages = A * beta_comp * beta_stab."""

    advantages: torch.Tensor
    beta_comp: torch.Tensor
    beta_stab: torch.Tensor


@torch_function
def entropy_change(
    advantages: Tensor,
    logprobs: Tensor,
    entropy: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
    expected_pi_lambda: Tensor | None = None,
) -> Tensor:
    """Predicted size of the entropy change that a token's update makes, Xi = |I r A (pi Lambda - E[pi Lambda])|.

    pi = exp(logprobs), Lambda = logprobs + entropy, r = exp(logprobs - old_logprobs); I is 0 where the clip stops the
    gradient. All arrays have one shape, nats; tokens outside `mask` get 0. `expected_pi_lambda`: exact, sum_v p_v^2
    (log p_v + H); None: as published, the mean of pi Lambda over the mask along the last axis ([B, L]: a sequence a
    row).
    """
    live = mask != 0
    pi_lambda = logprobs.exp() * (logprobs + entropy)
    if expected_pi_lambda is None:
        total = torch.where(live, pi_lambda, 0.0).sum(-1, keepdim=True)
        expected_pi_lambda = total / live.sum(-1, keepdim=True).clamp(min=1)
    # The published proxy does not bound the ratio. float32 still holds exp(80) and its products here.
    ratio = (logprobs - old_logprobs).clamp(max=80.0).exp()
    moves = ((advantages > 0) & (ratio <= 1 + clip_ratio_high)) | ((advantages < 0) & (ratio >= 1 - clip_ratio_low))
    change = (ratio * advantages * (pi_lambda - expected_pi_lambda)).abs()
    return torch.where(live & moves, change, 0.0)


@torch_function
def modulation_ranges(entropy: Tensor, entropy_change: Tensor, mask: Tensor) -> ModulationRanges:
    """Lowest and highest entropy and largest entropy change over the tokens in `mask` (arrays of one shape, nats)."""
    if entropy.numel() == 0:
        infinite = entropy.new_tensor(float("inf"))
        return ModulationRanges(infinite, -infinite, -infinite)
    live = mask != 0
    lowest = torch.where(live, entropy, float("inf")).amin()
    highest, most = (torch.where(live, x, float("-inf")).amax() for x in (entropy, entropy_change))
    return ModulationRanges(lowest, highest, most)


@torch_function
@torch.no_grad()
def modulate(
    advantages: Tensor,
    entropy: Tensor,
    entropy_change: Tensor,
    ranges: ModulationRanges,
    *,
    alpha: float,
    lambda_min: float,
    gamma: float,
    tau: float,
) -> Modulated:
    """Scales advantages: up to 1 + alpha at low entropy where A > 0, down to lambda_min at a large entropy change.

    beta_stab = lambda_min + (1 - lambda_min) / (1 + exp(gamma (x - tau))), x = Xi / (max Xi + 1e-8);
    beta_comp = 1 + alpha (H_max - H) / (H_max - H_min + 1e-8) where A > 0, else 1. Both fractions are clamped to
    [0, 1], since the ranges may be of an earlier policy (scope mini_batch). Arrays of one shape, nats.
    """
    low, high, change_max = (torch.as_tensor(value, dtype=entropy.dtype, device=entropy.device) for value in ranges)
    change = (entropy_change / (change_max + EPS)).clamp(0, 1)
    # sigmoid(-z) is 1 / (1 + exp(z)) without its overflow
    beta_stab = lambda_min + (1 - lambda_min) * torch.sigmoid(gamma * (tau - change))
    certainty = ((high - entropy) / (high - low + EPS)).clamp(0, 1)
    beta_comp = torch.where(advantages > 0, 1 + alpha * certainty, 1.0)
    return Modulated(advantages * beta_comp * beta_stab, beta_comp, beta_stab)
