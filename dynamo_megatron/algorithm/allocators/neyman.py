"""The exact optimum of the theory (DynaMO, arXiv 2602.19208, with integer counts and bounds), also with prices."""

from __future__ import annotations

import numpy as np

from dynamo_megatron.algorithm.allocators.base import Allocator
from dynamo_megatron.algorithm.allocators.checks import checked
from dynamo_megatron.algorithm.arrays import Array, like
from dynamo_megatron.algorithm.history import Statistics

# Relative: counts that cost the budget exactly are not refused for the rounding of a sum.
ROUNDING = 1e-12


class Neyman(Allocator):
    """Minimises sum_i v_i / n_i, v_i the expected variance plus `variance_floor` times the batch's mean variance."""

    def variance(self, prompts: Statistics, pool: Statistics) -> np.ndarray:
        variance = super().variance(prompts, pool)
        return variance + self.config.variance_floor * variance.mean()

    def counts(self, prompts: Statistics, variance: np.ndarray, budget: int, low: int, high: int) -> np.ndarray:
        return self.priced_counts(variance, np.ones(len(prompts)), budget, low, high)

    def priced_counts(self, variance: np.ndarray, price: np.ndarray, budget: float, low: int, high: int) -> np.ndarray:
        """As `priced`, with the variances [N] that `variance` returned."""
        # If all variances are 0, all counts are equally good: then spread evenly, not to the lower indices first.
        return priced(variance if variance.any() else np.ones(len(variance)), price, budget, low, high)


def neyman(variance: Array, budget: int, rollout_n_min: int, rollout_n_max: int) -> Array:
    """The exact integer minimiser of sum_i variance_i / n_i, int64 [N] (Neyman allocation, integer and bounded).

    sum n = budget clipped to [N rollout_n_min, N rollout_n_max], rollout_n_min <= n_i <= rollout_n_max. One rollout
    more for prompt i gains variance_i / (n (n + 1)), which falls with n, so taking the largest gains one by one is
    optimal; ties go to the lower index. Prompts of variance 0 get what the others have no room for, in index order.

    Raises ValueError for bounds that contradict each other or a variance that is negative or not finite.
    """
    v = checked(variance, "variance", 1, rollout_n_min, rollout_n_max)
    budget = min(max(budget, len(v) * rollout_n_min), len(v) * rollout_n_max)
    return like(priced(v, np.ones(len(v)), budget, rollout_n_min, rollout_n_max), variance)


def priced(variance: np.ndarray, price: np.ndarray, budget: float, low: int, high: int) -> np.ndarray:
    """As `neyman`, but a rollout of prompt i costs price_i > 0: int64 [N] with sum price n <= budget, up to rounding.

    Takes the largest gains variance_i / (n (n + 1) price_i) one by one until the next one costs more than is left. So
    less than a rollout's price is left, unless all prompts have `high`, and no counts of at most the same cost have a
    smaller sum variance / n. (Counts that use up the rest may: a knapsack problem.) The caller ensures
    low sum price <= budget.
    """
    n = _below_optimum(variance, price, budget, low, high)
    while True:
        left = budget * (1 + ROUNDING) - float((price * n).sum())
        open_ = np.flatnonzero((n < high) & (variance > 0))
        if not len(open_):
            return _fill_in_order(n, price, left, high)
        have, per_price = n[open_].astype(np.float64), variance[open_] / price[open_]
        gain = per_price / (have * (have + 1))
        after = np.where(have + 1 < high, per_price / ((have + 1) * (have + 2)), -np.inf)
        # A prompt's next gain that is above all gains after next is taken next, whatever the order of the rest. There
        # is always such a gain, unless gains are so small (1e-300) that a prompt's next two gains are equal.
        ready = np.flatnonzero(gain > after.max())
        if not len(ready):
            ready = np.array([gain.argmax()])
        ready = ready[np.argsort(-gain[ready], kind="stable")]
        fits = np.cumsum(price[open_[ready]]) <= left
        n[open_[ready[fits]]] += 1
        if not fits.all():
            return n


def _below_optimum(v: np.ndarray, price: np.ndarray, budget: float, low: int, high: int) -> np.ndarray:
    """Counts that are nowhere above the optimum and few rollouts short of it, by bisection on the gain per price.

    Taking every rollout that gains more than t = 1 / s leaves n with n (n + 1) >= v s / price. One less than that stays
    below the optimum in spite of rounding.
    """
    n = np.full(len(v), low, np.int64)
    value = v / price
    positive = value[value > 0]
    if not len(positive) or budget <= low * price.sum():
        return n

    def counts(log_s: float) -> np.ndarray:
        with np.errstate(over="ignore"):
            root = np.sqrt(1 + 4 * value * np.exp(log_s))
        return np.clip(np.ceil((root - 1) / 2), low, high)

    below = np.log(low) - np.log(positive.max())
    above = min(2 * np.log(high + 1) - np.log(positive.min()), 700.0)
    best = None
    for _ in range(64):
        middle = (below + above) / 2
        trial = counts(middle)
        missing = budget - (price * trial).sum()
        if missing < 0:
            above = middle
            continue
        below, best = middle, trial
        if missing <= price.sum() / 64:
            break
    return n if best is None else np.maximum(best.astype(np.int64) - 1, low)


def _fill_in_order(n: np.ndarray, price: np.ndarray, left: float, high: int) -> np.ndarray:
    """Adds as many rollouts as `left` pays for, each prompt up to `high` before the next one."""
    room = high - n
    before = np.cumsum(price * room) - price * room
    return n + np.clip(np.floor((left - before) / price), 0, room).astype(np.int64)
