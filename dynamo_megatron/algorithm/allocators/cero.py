"""Rollouts where the whole run has given too few (CERO, arXiv 2606.05606)."""

from __future__ import annotations

import numpy as np

from dynamo_megatron.algorithm.allocators.base import Allocator
from dynamo_megatron.algorithm.allocators.largest_gains import largest_gains
from dynamo_megatron.algorithm.history import Statistics


class Cero(Allocator):
    """Maximises sum v_i (x_i + n_i) / (x_i + n_i + 1): x_i the rollouts of prompt i so far, v_i its expected p(1-p).

    The paper has a concave, saturating utility of a prompt's rollouts over all epochs, scaled by the posterior's
    E[p(1-p)] under a Beta posterior, and prices for the prompts and the run's budget that are moved by projected
    gradient steps. Its text was not at hand, so form and constants are ours: v x / (x + 1), whose optimum gives every
    prompt rollouts over the whole run in proportion to sqrt(v). The step's budget is given here and is used up exactly
    (largest gains first), where the paper may save rollouts for later steps; its prices are not needed for that. v is
    by `variance`, with a prior fitted to the pool. Nothing is forgotten.
    """

    forgets = False

    def counts(self, prompts: Statistics, variance: np.ndarray, budget: int, low: int, high: int) -> np.ndarray:
        value = variance if variance.any() else np.ones(len(variance))

        def gain(i: np.ndarray, n: np.ndarray) -> np.ndarray:
            so_far = prompts.trials[i] + n
            return value[i] / ((so_far + 1) * (so_far + 2))

        return largest_gains(gain, len(value), budget, low, high)
