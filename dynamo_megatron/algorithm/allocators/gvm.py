"""The allocation of GVM-RAFT (arXiv 2505.02391; code RLHFlow/GVM)."""

from __future__ import annotations

import numpy as np

from dynamo_megatron.algorithm.allocators.base import Allocator
from dynamo_megatron.algorithm.allocators.solvers import proportional
from dynamo_megatron.algorithm.energy_variance import measured_energies
from dynamo_megatron.algorithm.history import Statistics

ALPHA, BETA = 1e-3, 2.0  # as in the published run_em.sh


class Gvm(Allocator):
    """n ~ G / sqrt(p + alpha / p^(beta - 1)), G a prompt's gradient norm over right rollouts; 0 without a right one.

    The published code measures G by a backward pass through one matrix for each right rollout of a first stage. Here G
    is sqrt(mean energy of right rollouts), from forward passes only; if none is known, the pool's. p is the success
    rate of the prompt's earlier rollouts in place of a first stage; without history it is the pool's. Counts are
    clamped to the bounds.
    """

    def variance(self, prompts: Statistics, pool: Statistics) -> np.ndarray:
        """What the counts are proportional to, float64 [N]."""
        p = observed_rate(prompts, pool)
        right, _ = measured_energies(prompts, pool)
        safe = np.where(p > 0, p, 1.0)
        return np.where(p > 0, np.sqrt(right / (safe + ALPHA / safe ** (BETA - 1))), 0.0)

    def counts(self, prompts: Statistics, variance: np.ndarray, budget: int, low: int, high: int) -> np.ndarray:
        return proportional(variance, budget, low, high)


def observed_rate(prompts: Statistics, pool: Statistics) -> np.ndarray:
    """Successes / rollouts of each prompt, float64 [N]; without history the pool's, and without a pool 1/2."""
    trials = pool.trials.sum()
    unknown = pool.successes.sum() / trials if trials > 0 else 0.5
    seen = prompts.trials > 0
    return np.divide(prompts.successes, prompts.trials, out=np.full(len(prompts), unknown), where=seen)
