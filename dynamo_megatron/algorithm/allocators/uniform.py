"""The same number of rollouts for every prompt."""

from __future__ import annotations

import numpy as np

from dynamo_megatron.algorithm.allocators.base import Allocator
from dynamo_megatron.algorithm.history import Statistics


def spread(prompts: int, budget: int) -> np.ndarray:
    """The budget spread evenly, int64 [prompts]; the remainder goes to the lower indices."""
    return budget // prompts + (np.arange(prompts) < budget % prompts).astype(np.int64)


class Uniform(Allocator):
    def counts(self, prompts: Statistics, variance: np.ndarray, budget: int, low: int, high: int) -> np.ndarray:
        return spread(len(prompts), budget)
