"""Advantages from rewards by group identity: any group sizes, any order of the rollouts."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np

from dynamo_megatron.algorithm.arrays import Array, finite, group_index, like, to_numpy, torch_function
from dynamo_megatron.config.method import GROUP_ADVANTAGES, AdvantageConfig
from dynamo_megatron.runtime.late import torch


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

    `grpo` (arXiv 2402.03300): (r - mean) / (std + eps), ddof 1. `dr_grpo` (arXiv 2503.20783): r - mean. `rloo` (arXiv
    2402.14740): r - mean of the group's other rollouts. A group of equal rewards gets exactly 0, and a group of one 0,
    or with `singleton="raw"` its reward, as in the published trainer. `reinforce`: 2 r - 1 whatever the group, for
    rewards in [0, 1]; with `positive_weight` 0.1, by which positive advantages are multiplied, it is W-REINFORCE (arXiv
    2506.01347). Raises ValueError naming the argument that is unknown, not finite, out of range or too short.
    """
    if kind not in GROUP_ADVANTAGES:
        raise ValueError(f"kind: {kind!r} is unknown; one of {', '.join(GROUP_ADVANTAGES)}")
    if singleton not in ("zero", "raw"):
        raise ValueError(f"singleton: {singleton!r} is unknown; one of zero, raw")
    values = finite(rewards, "rewards")
    index, groups = group_index(group_ids, len(values))
    if kind == "reinforce":
        _check_unit_interval(values, "reinforce takes")
        return _as_given(weighted(2 * values - 1, positive_weight), rewards)

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
    return _as_given(weighted(result, positive_weight), rewards)


def history_advantages(
    rewards: Array,
    group_ids: Sequence[Hashable],
    prior_mean: Array,
    prior_strength: Array,
    score_ratio: float = 1.0,
    *,
    reward_variance: float | None = None,
) -> Array:
    """Reward minus a leave-one-out baseline, shrunk to what was known before; float [S] of the rewards' dtype.

    A_j = r_j - p_j with p_j = (m c + sum of the group's other rewards) / (c + n - 1): n >= 1 rollouts in the group, m
    and c its `prior_mean` and `prior_strength` (in rollouts; float [S], equal within a group), fixed before the
    rollouts. A_j is 0 where c + n - 1 = 0. `score_ratio` rho: mean energy of wrong / of right rollouts, also fixed
    before. If it is not 1, rewards must be in [0, 1], and the baseline is the one of least variance, E[S r] / E[S] with
    an energy S linear in the reward (as in arXiv 2602.07078, per rollout): p_j + k v / (1 + k p_j), k = 1 / rho - 1, v
    the `reward_variance`, by default the most, p_j (1 - p_j). Raises ValueError naming the argument that does not fit.
    """
    values = finite(rewards, "rewards")
    index, groups = group_index(group_ids, len(values))
    m, c = finite(prior_mean, "prior_mean"), finite(prior_strength, "prior_strength")
    if not len(m) == len(c) == len(values):
        raise ValueError(f"prior_mean, prior_strength: {len(m)} and {len(c)} entries for {len(values)} rollouts")
    for name, each in (("prior_mean", m), ("prior_strength", c)):
        of_group = np.zeros(groups)
        of_group[index] = each
        if (of_group[index] != each).any():
            raise ValueError(f"{name}: rollouts of one group have different values")
    if (c < 0).any():
        raise ValueError(f"prior_strength: {c.min()} rollouts; expected 0 or more")
    if not (np.isfinite(score_ratio) and score_ratio > 0):
        raise ValueError(f"score_ratio: {score_ratio}; expected a finite number above 0")
    n = np.bincount(index, minlength=groups)
    others = m * c + np.bincount(index, values, minlength=groups)[index] - values
    count = c + n[index] - 1
    p = np.divide(others, count, out=values.copy(), where=count > 0)
    if score_ratio != 1:
        _check_unit_interval(values, "the optimal baseline (score_ratio other than 1) takes")
        p = np.clip(p, 0, 1)  # rounding
        slope = 1 / score_ratio - 1
        variance = p * (1 - p)  # the most that rewards in [0, 1] can vary
        if reward_variance is not None:
            variance = np.minimum(variance, reward_variance)
        p = np.where(count > 0, p + slope * variance / (1 + slope * p), values)
    return _as_given(values - p, rewards)


def _check_unit_interval(rewards: np.ndarray, what: str) -> None:
    if (bad := np.flatnonzero((rewards < 0) | (rewards > 1))).size:
        raise ValueError(f"rewards: entry {bad[0]} is {rewards[bad[0]]}; {what} rewards from 0 to 1")


def informative(rewards: Array, group_ids: Sequence[Hashable]) -> np.ndarray:
    """Whether a rollout's group has different rewards (float [S]), bool [S]: DAPO's dynamic sampling (arXiv 2503.14476,
    Eq. 11), for any rewards."""
    values = to_numpy(rewards, "rewards")
    index, groups = group_index(group_ids, len(values))
    low, high = np.full(groups, np.inf), np.full(groups, -np.inf)
    np.minimum.at(low, index, values)
    np.maximum.at(high, index, values)
    return (low < high)[index]


def overlong_penalty(lengths: Array, max_length: int, buffer: float, most: float) -> Array:
    """Returns the value to add to each reward, float64 [S]: 0 up to the buffer, falling to -`most` at `max_length`
    tokens (DAPO, Eq. 13). lengths: int [S], response tokens. The buffer is the last share `buffer` of `max_length`."""
    tokens = buffer * max_length
    excess = to_numpy(lengths, "lengths") - (max_length - tokens)
    return like(most * np.clip(-excess / tokens, -1.0, 0.0), lengths)


def weighted(advantages: np.ndarray, positive_weight: float) -> np.ndarray:
    """Multiplies the positive advantages by `positive_weight` (W-REINFORCE)."""
    return np.where(advantages > 0, positive_weight * advantages, advantages)


def batch_normalised(advantages: np.ndarray) -> np.ndarray:
    """(advantage - mean) / (standard deviation (ddof 1) + 1e-8), float64 [S]: SPO's (arXiv 2509.13232)."""
    above = advantages - advantages.min(initial=np.inf)  # of equal ones exact zeros, whose mean is not rounded
    centred = above - above.mean() if len(above) else above
    return centred / (np.sqrt((centred**2).sum() / max(len(centred) - 1, 1)) + 1e-8)


def _as_given(result: np.ndarray, rewards: Array) -> Array:
    """Returns `result` in the rewards' dtype and library."""
    dtype = to_numpy(rewards, "rewards").dtype
    return like(result.astype(dtype if dtype.kind == "f" else np.float64), rewards)


@torch_function
def entropy_advantages(advantages: torch.Tensor, entropy: torch.Tensor, alpha: float, kappa: float) -> torch.Tensor:
    """A + min(alpha H, |A| / kappa) per token (arXiv 2506.14758, section 3). Arrays of one shape, entropy in nats."""
    return advantages + torch.minimum(alpha * entropy, advantages.abs() / kappa)


def process_advantages(
    rewards: np.ndarray, group: np.ndarray, lengths: np.ndarray, config: AdvantageConfig
) -> np.ndarray:
    """`config.process.weight` times the return of each token, float64 [R].

    rewards: float64 [R], NaN where no step ends. group, lengths: int64 [S], of the rollouts that the R tokens belong
    to. The kinds `grpo` and `dr_grpo` compare a step with all steps of the group (arXiv 2402.03300, section 4.1.3), all
    others with the mean, over the group's other rollouts, of their mean step. The steps of the only rollout with steps
    count 0, or with `singleton: raw` their rewards.
    """
    ends = np.flatnonzero(~np.isnan(rewards))
    owner = np.repeat(np.arange(len(lengths)), lengths)[ends]
    steps = np.bincount(owner, minlength=len(lengths))
    having = np.bincount(group, steps > 0, minlength=len(lengths))[group]  # rollouts of the group with steps
    values = rewards[ends]
    if config.kind in ("grpo", "dr_grpo"):
        centred = group_advantages(values, group[owner].tolist(), config.kind, eps=config.eps)
    else:
        # Measured from the group's lowest, equal rewards are exactly 0.
        lowest = np.full(len(steps), np.inf)
        np.minimum.at(lowest, group[owner], values)
        shifted = values - lowest[group[owner]]
        mean = np.bincount(owner, shifted, minlength=len(steps)) / np.maximum(steps, 1)
        others = np.bincount(group, mean, minlength=len(steps))[group] - mean
        centred = shifted - (others / np.maximum(having - 1, 1))[owner]
    left = np.where(config.singleton == "raw", values, 0.0)
    each = np.zeros(len(rewards))
    each[ends] = np.where(having[owner] == 1, left, centred)
    return config.process.weight * discounted_returns(each, lengths, config.process.gamma)


def discounted_returns(rewards: np.ndarray, lengths: np.ndarray, gamma: float) -> np.ndarray:
    """G_t = r_t + gamma G_{t+1} within each rollout, 0 after its end, float64 [R]. lengths: int64 [S]."""
    ends = np.cumsum(lengths)[np.argsort(-lengths, kind="stable")]  # the longest first
    as_long = np.cumsum(np.bincount(lengths, minlength=1)[::-1])[::-1]  # [n]: rollouts of n tokens or more
    returns, following = np.zeros(len(rewards)), np.zeros(len(lengths))
    for place, count in enumerate(as_long[1:], 1):  # from the end, all rollouts at once
        here = ends[:count] - place
        following[:count] = rewards[here] + gamma * following[:count]
        returns[here] = following[:count]
    return returns
