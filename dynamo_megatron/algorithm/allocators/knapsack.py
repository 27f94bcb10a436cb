"""Maximises the expected value of the groups that have a gradient (Knapsack RL, arXiv 2509.25849)."""

from __future__ import annotations

import numpy as np

from dynamo_megatron.algorithm.allocators.base import Allocator
from dynamo_megatron.algorithm.allocators.largest_gains import largest_gains
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
        p, q = variance, 1 - variance
        log_p, log_q, worth = np.log(p), np.log(q), p * q * p * q * q  # p^n q + q^n p = p q (p^(n-1) + q^(n-1))

        def gain(i: np.ndarray, n: np.ndarray) -> np.ndarray:
            return worth[i] * (np.exp((n - 1) * log_p[i]) + np.exp((n - 1) * log_q[i]))

        return largest_gains(gain, len(p), budget, low, high)
