"""The exact optimum of the theory (DynaMO, arXiv 2602.19208, with integer counts and bounds), also with prices."""

from __future__ import annotations

import numpy as np

from dynamo_megatron.algorithm.allocators.base import Allocator
from dynamo_megatron.algorithm.allocators.solvers import checked, largest_gains
from dynamo_megatron.algorithm.arrays import Array, like
from dynamo_megatron.algorithm.history import Statistics


class Neyman(Allocator):
    """Minimises sum_i v_i / n_i, v_i the expected variance plus `variance_floor` times the batch's mean variance."""

    def variance(self, prompts: Statistics, pool: Statistics) -> np.ndarray:
        variance = super().variance(prompts, pool)
        return variance + self.config.variance_floor * variance.mean()

    def counts(self, prompts: Statistics, variance: np.ndarray, budget: int, low: int, high: int) -> np.ndarray:
        return self.priced_counts(variance, np.ones(len(prompts)), budget, low, high)

    def priced_counts(self, variance: np.ndarray, price: np.ndarray, budget: float, low: int, high: int) -> np.ndarray:
        """As `priced`, with the variances [N] that `variance` returned."""
        if not variance.any():
            # All counts are equally good: spread evenly, not to the lower indices first.
            variance = np.ones(len(variance))
        return priced(variance, price, budget, low, high)


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

    No counts of at most the same cost have a smaller sum variance / n. (Counts that use up the rest may: a knapsack
    problem.) The caller ensures low sum price <= budget.
    """
    if not len(variance):
        return np.zeros(0, np.int64)
    return largest_gains(lambda n: variance[:, None] / (n * (n + 1)), price, budget, low, high)
