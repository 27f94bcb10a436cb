"""The rollouts of CurES (arXiv 2510.01037, equation 127; code ZexuSun/CurES)."""

from __future__ import annotations

import numpy as np

from dynamo_megatron.algorithm.allocators.base import Allocator
from dynamo_megatron.algorithm.allocators.gvm import observed_rate
from dynamo_megatron.algorithm.allocators.solvers import proportional
from dynamo_megatron.algorithm.energy_variance import measured_energies
from dynamo_megatron.algorithm.history import Statistics


class Cures(Allocator):
    """n ~ sigma, sigma^2 = p q^2 E1[G^2] + p^2 q E0[G^2] - p^2 q^2 (E1[G] - E0[G])^2, q = 1 - p, G gradient norms of
    right (1) and of wrong (0) rollouts; a prompt that was always right or always wrong has sigma 0.

    The published code measures norms by backward passes once, before training. Here E[G^2] is the mean energy of
    earlier rollouts (the pool's if none is known) and E[G] its root, so sigma = sqrt(p q) (q G1 + p G0). p is the
    success rate of the prompt's earlier rollouts; without history it is the pool's. The method's selection of prompts
    is not implemented.
    """

    def variance(self, prompts: Statistics, pool: Statistics) -> np.ndarray:
        """sigma, float64 [N]."""
        p = observed_rate(prompts, pool)
        right, wrong = (np.sqrt(energy) for energy in measured_energies(prompts, pool))
        return np.sqrt(p * (1 - p)) * ((1 - p) * right + p * wrong)

    def counts(self, prompts: Statistics, variance: np.ndarray, budget: int, low: int, high: int) -> np.ndarray:
        return proportional(variance, budget, low, high)
