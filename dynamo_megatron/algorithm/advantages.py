"""Advantages from rewards by group identity: any group sizes, any order of the rollouts."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np
import torch

from dynamo_megatron.algorithm.arrays import Array, group_index, like, to_numpy, torch_function
from dynamo_megatron.config.method import ADVANTAGES


def group_advantages(
    rewards: Array,
    group_ids: Sequence[Hashable],
    kind: str,
    *,
    singleton: Literal["zero", "raw"] = "zero",
    eps: float = 1e-6,
    positive_weight: float = 1.0,
) -> Array:
    """Advantage of every rollout against its group, float [S] of the rewards' dtype.

    `grpo` (arXiv 2402.03300): (r - mean) / (std + eps), ddof 1. `dr_grpo` (arXiv 2503.20783): r - mean.
    `rloo` (arXiv 2402.14740): r - mean of the group's other rollouts. A group of equal rewards gets exactly 0.
    A group of one gets 0, or with `singleton="raw"` what the published trainer gives it: the reward (mean 0, std 1).
    `reinforce`: 2 r - 1 whatever the group, for rewards from 0 (wrong: -1) to 1 (right: 1).
    `positive_weight` multiplies the positive advantages. W-REINFORCE (arXiv 2506.01347: loss = lambda PSR + NSR) is
    `reinforce` with 0.1.

    Raises ValueError for an unknown kind, a reward that is not finite, for `reinforce` one outside [0, 1], or ids that
    do not fit the rewards.
    """
    if kind not in ADVANTAGES:
        raise ValueError(f"kind: {kind!r} is unknown; one of {', '.join(ADVANTAGES)}")
    if singleton not in ("zero", "raw"):
        raise ValueError(f"singleton: {singleton!r} is unknown; one of zero, raw")
    given = to_numpy(rewards, "rewards")
    values = given.astype(np.float64)
    index, groups = group_index(group_ids, len(values))
    if not np.isfinite(values).all():
        bad = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ValueError(f"rewards: entry {bad} is {values[bad]}; rewards must be finite")
    if kind == "reinforce":
        if (bad := np.flatnonzero((values < 0) | (values > 1))).size:
            raise ValueError(f"rewards: entry {bad[0]} is {values[bad[0]]}; reinforce takes rewards from 0 to 1")
        return _as_given(weighted(2 * values - 1, positive_weight), given, rewards)

    size = np.bincount(index, minlength=groups)
    # Measured from the group's lowest reward, equal rewards are exactly 0 and leave no rounding error behind.
    lowest = np.full(groups, np.inf)
    np.minimum.at(lowest, index, values)
    shifted = values - lowest[index]
    mean = np.bincount(index, shifted, minlength=groups) / size
    centred = shifted - mean[index]
    if kind == "grpo":
        std = np.sqrt(np.bincount(index, centred**2, minlength=groups) / np.maximum(size - 1, 1))
        scale = std[index] + eps
        result = np.divide(centred, scale, out=np.zeros_like(centred), where=scale > 0)
    elif kind == "dr_grpo":
        result = centred
    else:
        result = centred * (size / np.maximum(size - 1, 1))[index]

    alone = size[index] == 1
    raw = values / (1 + eps) if kind == "grpo" else values
    result = np.where(alone, raw if singleton == "raw" else 0.0, result)
    return _as_given(weighted(result, positive_weight), given, rewards)


def weighted(advantages: np.ndarray, positive_weight: float) -> np.ndarray:
    """With the positive ones times `positive_weight` (W-REINFORCE)."""
    return np.where(advantages > 0, positive_weight * advantages, advantages)


def batch_normalised(advantages: np.ndarray) -> np.ndarray:
    """Less their mean, over their standard deviation (ddof 1) + 1e-8, float64 [S]: SPO's global normalisation (arXiv
    2509.13232), with its public code's constant. A single one gets 0."""
    centred = advantages - advantages.mean() if len(advantages) else advantages
    return centred / (np.sqrt((centred**2).sum() / max(len(centred) - 1, 1)) + 1e-8)


def _as_given(result: np.ndarray, given: np.ndarray, rewards: Array) -> Array:
    """In the rewards' dtype and library."""
    return like(result.astype(given.dtype if given.dtype.kind == "f" else np.float64), rewards)


@torch_function
def entropy_advantages(advantages: Array, entropy: Array, alpha: float, kappa: float) -> Array:
    """A + min(alpha H, |A| / kappa) per token, no gradient: entropy-shaped advantages (arXiv 2506.14758, section 3).

    Arrays of one shape, entropy in nats. With kappa above 1 no advantage changes its sign; one of 0 stays 0.
    """
    return advantages + torch.minimum(alpha * entropy, advantages.abs() / kappa)
