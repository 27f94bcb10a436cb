"""Advantages from a critic's values: generalised advantage estimation (arXiv 1506.02438), and the critic's own loss.

The steps of a rollout are its R response tokens in order. The value of a step is the critic's before the token is
sampled; after a rollout's last token it is 0, whether the response is finished or truncated. The steps of an agent's
episode are its turns (`turn_advantages`), or its tokens, those of all turns joined: what the environment wrote between
them is no step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dynamo_megatron.algorithm.advantages import discounted_returns
from dynamo_megatron.algorithm.arrays import torch_function
from dynamo_megatron.runtime.late import torch


class Estimates(NamedTuple):
    """Per response token, float64 [R]."""

    advantages: np.ndarray
    returns: np.ndarray  # advantage + value, which the critic learns to predict


def token_rewards(outcomes: np.ndarray, lengths: np.ndarray, process: list[np.ndarray], weight: float) -> np.ndarray:
    """The reward of each response token, float64 [R]: the rollout's outcome (float64 [S]) at its last token, and
    `weight` times each of `process` (float64 [R], NaN where there is none). lengths: int64 [S], tokens."""
    rewards = np.zeros(int(lengths.sum()))
    for each in process:
        rewards += weight * np.nan_to_num(each)
    some = lengths > 0
    rewards[np.cumsum(lengths)[some] - 1] += outcomes[some]
    return rewards


def generalised_advantages(
    rewards: np.ndarray, values: np.ndarray, lengths: np.ndarray, gamma: float, lam: float
) -> Estimates:
    """A_t = d_t + gamma lam A_{t+1} with d_t = r_t + gamma V_{t+1} - V_t, within each rollout.

    rewards, values: float [R], through the rollouts in order. lengths: int64 [S], tokens. Raises ValueError for arrays
    of other lengths.
    """
    count = int(lengths.sum())
    if not len(rewards) == len(values) == count:
        raise ValueError(f"rewards, values: {len(rewards)} and {len(values)} entries for {count} response tokens")
    values = values.astype(np.float64)
    following = np.append(values, 0.0)[1:]
    following[np.cumsum(lengths)[lengths > 0] - 1] = 0.0
    advantages = discounted_returns(rewards + gamma * following - values, lengths, gamma * lam)
    return Estimates(advantages, advantages + values)


def turn_advantages(
    rewards: np.ndarray, values: np.ndarray, turns: tuple[np.ndarray, np.ndarray], gamma: float, lam: float
) -> Estimates:
    """`generalised_advantages` where a step is a turn: its value is that of its first token, its reward the sum over
    its tokens, and every token of it has its advantage and return. turns: as `Sequences.turns`."""
    counts, lengths = turns
    firsts = np.cumsum(lengths) - lengths
    found = generalised_advantages(np.add.reduceat(rewards, firsts), values[firsts], counts, gamma, lam)
    return Estimates(*(np.repeat(each, lengths) for each in found))


def whitened(advantages: np.ndarray) -> np.ndarray:
    """(advantage - mean) / sqrt(variance (ddof 1) + 1e-8) over all tokens, float64 [R], as in verl and TRL."""
    if len(advantages) == 0:
        return advantages
    centred = advantages - advantages.mean()
    return centred / np.sqrt((centred**2).sum() / max(len(centred) - 1, 1) + 1e-8)


class ValueLoss(NamedTuple):
    loss: torch.Tensor  # per token
    clipped: torch.Tensor  # bool: the clip decided the loss


@torch_function
def value_loss(values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float | None) -> ValueLoss:
    """max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2, or without a clip (V - R)^2 / 2. Arrays of one
    shape; differentiable in `values`."""
    plain = (values - returns).square()
    if clip is None:
        return ValueLoss(0.5 * plain, torch.zeros_like(plain, dtype=torch.bool))
    bounded = (torch.clamp(values, old_values - clip, old_values + clip) - returns).square()
    return ValueLoss(0.5 * torch.maximum(plain, bounded), bounded > plain)


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float:
    """1 - Var(returns - values) / Var(returns) over all tokens: 1 for a perfect critic, 0 for a constant; 0 where all
    returns are equal."""
    if not len(returns) or np.ptp(returns) <= 1e-9 * np.abs(returns).max():  # their mean is rounded
        return 0.0
    return float(1 - (returns - values).var() / returns.var())
