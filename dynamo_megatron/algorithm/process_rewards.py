"""Converts the rewards of a response's steps to the terms that they add to its tokens' advantages.

A step's reward belongs to its last token. Minus the group's baseline it counts for that token and all tokens before it:
the return from token t is G_t = sum_{k >= t} gamma^(k-t) (r_k - b), over the tokens k at which a step ends. The
outcome's advantage is computed separately (as in PRIME, arXiv 2502.01456).
"""

from __future__ import annotations

import numpy as np

from dynamo_megatron.algorithm.advantages import group_advantages
from dynamo_megatron.config.method import AdvantageConfig


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
