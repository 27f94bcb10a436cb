"""The allocation of the published code (GithubX-F/DynaMO-RL)."""

from __future__ import annotations

import heapq

import numpy as np

from dynamo_megatron.algorithm.allocators.base import Allocator
from dynamo_megatron.algorithm.allocators.solvers import checked, settle
from dynamo_megatron.algorithm.arrays import Array, like, to_numpy
from dynamo_megatron.algorithm.history import Statistics
from dynamo_megatron.algorithm.success import success_variance

LEAST_PRIORITY = 1e-8  # at or below it a prompt takes no part in the published proportional share
# The published priority of solved prompts, those with at least this success rate, is this variance.
SOLVED_RATE = 0.85
SOLVED_VARIANCE = 0.01


class Waterfill(Allocator):
    """Shares the budget in proportion to sigma or, as published, sigma^2 (`power`)."""

    forgets = False

    def variance(self, prompts: Statistics, pool: Statistics) -> np.ndarray:
        """The priority, float64 [N]."""
        # Fewer than two rollouts have no variance: the priority is 0, and `initial_budget` provides rollouts.
        variance = np.nan_to_num(success_variance(prompts.successes, prompts.trials))
        priority = published_priority(prompts.successes / np.maximum(prompts.trials, 1), variance)
        return np.sqrt(priority) if self.config.power == "sigma" else priority

    def counts(self, prompts: Statistics, variance: np.ndarray, budget: int, low: int, high: int) -> np.ndarray:
        return waterfill(prompts.trials, variance, budget, low, high, self.config.initial_budget)


def published_priority(success_rate: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """The variance, or for prompts that count as solved the published constant; float64 [N]."""
    return np.where(success_rate >= SOLVED_RATE, SOLVED_VARIANCE, variance)


def waterfill(
    sample_counts: Array,
    priority: Array,
    total_rollout_n: int,
    rollout_n_min: int,
    rollout_n_max: int,
    initial_budget: int,
) -> Array:
    """The allocation of the published code (GithubX-F/DynaMO-RL), kept within its bounds; int64 [N].

    `sample_counts`: the rollouts of each prompt so far. `priority` >= 0: what a prompt's share is proportional to.
    sum n = total_rollout_n clipped to [N rollout_n_min, N rollout_n_max]. First every prompt is brought to
    max(rollout_n_min, initial_budget) samples, then to the lower bound, then the rest is shared by priority. At last
    rollouts are added or removed one by one in index order until the sum fits (the published code breaks the bounds
    there).

    Raises ValueError for bounds or lengths that contradict each other and for entries that are negative or not finite.
    """
    share = checked(priority, "priority", 0, rollout_n_min, rollout_n_max)
    seen = to_numpy(sample_counts, "sample_counts")
    if seen.shape != share.shape:
        raise ValueError(f"sample_counts: {len(seen)} entries for {len(share)} priorities")
    if (bad := np.flatnonzero(~(np.isfinite(seen) & (seen >= 0)))).size:
        raise ValueError(f"sample_counts: entry {bad[0]} is {seen[bad[0]]}; expected a count")
    low, high = rollout_n_min, rollout_n_max
    budget = min(max(total_rollout_n, len(share) * low), len(share) * high)

    need = np.clip(max(low, initial_budget) - np.floor(seen).astype(np.int64), 0, high)
    n = need if need.sum() <= budget else _scale_down(need, budget, low)
    short = np.maximum(0, low - n)
    rest = budget - int(n.sum())
    if short.any():
        n = n + (short if short.sum() <= rest else short * rest // short.sum())
    n = _share_by_priority(n, share, budget, high)
    return like(settle(n, budget, low, high), priority)


def _scale_down(need: np.ndarray, budget: int, low: int) -> np.ndarray:
    """Scales `need` to the budget, with at least `low` each, then takes one off the largest until the sum fits."""
    n = np.maximum(need * budget // need.sum(), low)
    largest = [(-int(count), i) for i, count in enumerate(n) if count > low]
    heapq.heapify(largest)
    for _ in range(int(n.sum()) - budget):
        count, i = largest[0]
        n[i] -= 1
        if n[i] > low:
            heapq.heapreplace(largest, (count + 1, i))
        else:
            heapq.heappop(largest)
    return n


def _share_by_priority(n: np.ndarray, priority: np.ndarray, budget: int, high: int) -> np.ndarray:
    """Shares the rest in proportion to priority by largest remainders, capped at `high`, until no prompt has room."""
    n = n.copy()
    while (rest := budget - int(n.sum())) > 0:
        open_ = np.flatnonzero((n < high) & (priority > LEAST_PRIORITY))
        if not len(open_):
            break
        exact = rest * (priority[open_] / priority[open_].sum())
        whole = np.floor(exact).astype(np.int64)
        largest = np.argsort(-(exact - whole), kind="stable")[: max(0, rest - int(whole.sum()))]
        whole[largest] += 1
        n[open_] = np.minimum(n[open_] + whole, high)
    return n
