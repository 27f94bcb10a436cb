"""Gives rollouts to the prompts that have had too few over the whole run (CERO, arXiv 2606.05606)."""

from __future__ import annotations

import numpy as np

from dynamo_megatron.algorithm.allocators.base import Allocator
from dynamo_megatron.algorithm.allocators.solvers import largest_gains
from dynamo_megatron.algorithm.history import Statistics


class Cero(Allocator):
    """Maximises sum v_i (x_i + n_i) / (x_i + n_i + 1): x_i the rollouts of prompt i so far, v_i its expected p(1-p).

    The paper has a concave, saturating utility of a prompt's rollouts over all epochs, scaled by E[p(1-p)] under a Beta
    posterior, and prices for the prompts and the run's budget that are updated by projected gradient steps. Its text
    was not at hand, so form and constants are ours: v x / (x + 1), whose optimum gives every prompt rollouts over the
    whole run in proportion to sqrt(v). Here the step's budget is fixed and is used up exactly (largest gains first),
    which needs no prices; the paper may save rollouts for later steps. v is computed by `config.variance`, with a prior
    fitted to the pool. Observations keep their full weight.
    """

    forgets = False

    def counts(self, prompts: Statistics, variance: np.ndarray, budget: int, low: int, high: int) -> np.ndarray:
        value = variance if variance.any() else np.ones(len(variance))

        def gain(n: np.ndarray) -> np.ndarray:
            so_far = prompts.trials[:, None] + n
            return value[:, None] / ((so_far + 1) * (so_far + 2))

        return largest_gains(gain, np.ones(len(value)), budget, low, high)
