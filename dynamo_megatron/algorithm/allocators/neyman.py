"""The exact optimum of the theory (DynaMO, arXiv 2602.19208, with integer counts and bounds)."""

from __future__ import annotations

import numpy as np

from dynamo_megatron.algorithm.allocators.base import Allocator
from dynamo_megatron.algorithm.allocators.checks import checked
from dynamo_megatron.algorithm.arrays import Array, like
from dynamo_megatron.algorithm.history import Statistics


class Neyman(Allocator):
    """Minimises sum_i v_i / n_i, v_i the expected variance and a floor, `variance_floor` times the batch's mean."""

    def variance(self, prompts: Statistics, pool: Statistics) -> np.ndarray:
        variance = super().variance(prompts, pool)
        return variance + self.config.variance_floor * variance.mean()

    def counts(self, prompts: Statistics, variance: np.ndarray, budget: int, low: int, high: int) -> np.ndarray:
        # Where nothing varies all are the same to the objective; an even spread then, not the lower indices first.
        return neyman(variance if variance.any() else np.ones(len(prompts)), budget, low, high)


def neyman(variance: Array, budget: int, rollout_n_min: int, rollout_n_max: int) -> Array:
    """The exact integer minimiser of sum_i variance_i / n_i, int64 [N] (Neyman allocation, integer and bounded).

    sum n = budget clipped to [N rollout_n_min, N rollout_n_max], rollout_n_min <= n_i <= rollout_n_max. One rollout
    more for prompt i gains variance_i / (n (n + 1)), which falls with n, so taking the largest gains one by one is
    optimal; ties go to the lower index. Prompts of variance 0 get what the others have no room for, in index order.

    Raises ValueError for bounds that contradict each other or a variance that is negative or not finite.
    """
    v = checked(variance, "variance", 1, rollout_n_min, rollout_n_max)
    low, high = rollout_n_min, rollout_n_max
    budget = min(max(budget, len(v) * low), len(v) * high)
    n = _below_optimum(v, budget, low, high)
    assert n.sum() <= budget
    while left := budget - int(n.sum()):
        open_ = np.flatnonzero((n < high) & (v > 0))
        if not len(open_):
            return like(_fill_in_order(n, left, high), variance)
        have = n[open_].astype(np.float64)
        gain = v[open_] / (have * (have + 1))
        after = np.where(have + 1 < high, v[open_] / ((have + 1) * (have + 2)), -np.inf)
        # A first gain above every second gain is among the next to be taken whatever the order of the rest. There is
        # always one, unless the gains are so small (1e-300) that a first and its second gain are the same number.
        ready = np.flatnonzero(gain > after.max())
        if not len(ready):
            ready = np.array([gain.argmax()])
        if len(ready) > left:
            ready = ready[np.argsort(-gain[ready], kind="stable")[:left]]
        n[open_[ready]] += 1
    return like(n, variance)


def _below_optimum(v: np.ndarray, budget: int, low: int, high: int) -> np.ndarray:
    """Counts that are nowhere above the optimum and few rollouts short of it, by bisection on the gain.

    Taking every rollout that gains more than t = 1 / s leaves n with n (n + 1) >= v s. One less than that stays below
    the optimum in spite of rounding.
    """
    n = np.full(len(v), low, np.int64)
    positive = v[v > 0]
    if not len(positive) or budget <= low * len(v):
        return n

    def counts(log_s: float) -> np.ndarray:
        with np.errstate(over="ignore"):
            root = np.sqrt(1 + 4 * v * np.exp(log_s))
        return np.clip(np.ceil((root - 1) / 2), low, high)

    below = np.log(low) - np.log(positive.max())
    above = min(2 * np.log(high + 1) - np.log(positive.min()), 700.0)
    best = None
    for _ in range(64):
        middle = (below + above) / 2
        trial = counts(middle)
        missing = budget - trial.sum()
        if missing < 0:
            above = middle
            continue
        below, best = middle, trial
        if missing <= len(v) // 64:
            break
    return n if best is None else np.maximum(best.astype(np.int64) - 1, low)


def _fill_in_order(n: np.ndarray, left: int, high: int) -> np.ndarray:
    """`left` more, each prompt up to `high` before the next one."""
    room = high - n
    before = np.cumsum(room) - room
    return n + np.clip(left - before, 0, room)
