"""Maximises the expected value of the groups that have a gradient (Knapsack RL, arXiv 2509.25849)."""

from __future__ import annotations

import numpy as np

from dynamo_megatron.algorithm.allocators.base import Allocator
from dynamo_megatron.algorithm.allocators.solvers import largest_gains
from dynamo_megatron.algorithm.history import Statistics
from dynamo_megatron.algorithm.success import success_rate


class Knapsack(Allocator):
    """Maximises sum (1 - p^n - (1-p)^n) p (1-p)^2: the chance that a group's rewards differ, times the expected rise
    of p by a gradient step (the paper's information gain).

    The paper solves it by dynamic programming. The value is concave in n, so taking the largest gains one by one gives
    the same optimum. In the paper p is the success rate of the last visit, and prompts that were always right or always
    wrong have no value: they get a fixed number of rollouts, and in public code a share of those that the others are
    estimated not to need. Here p is the posterior mean under a prior fitted to the pool. It is never 0 or 1, so no such
    rule is needed.
    """

    def variance(self, prompts: Statistics, pool: Statistics) -> np.ndarray:
        """p, the success rate."""
        return success_rate(prompts, pool)

    def counts(self, prompts: Statistics, variance: np.ndarray, budget: int, low: int, high: int) -> np.ndarray:
        p = variance[:, None]
        q = 1 - p

        def gain(n: np.ndarray) -> np.ndarray:  # p^n q + q^n p, times the worth p q^2
            return p * q * q * (p**n * q + q**n * p)

        return largest_gains(gain, np.ones(len(p)), budget, low, high)
