"""The same number of rollouts for every prompt."""

from __future__ import annotations

import numpy as np

from dynamo_megatron.algorithm.allocators.base import Allocator
from dynamo_megatron.algorithm.allocators.solvers import spread
from dynamo_megatron.algorithm.history import Statistics


class Uniform(Allocator):
    def counts(self, prompts: Statistics, variance: np.ndarray, budget: int, low: int, high: int) -> np.ndarray:
        return spread(len(prompts), budget)
