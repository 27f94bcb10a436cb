"""The interface of an allocator."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from dynamo_megatron.algorithm.history import Statistics
from dynamo_megatron.algorithm.success import expected_variance
from dynamo_megatron.config import AllocationConfig


class Allocator(ABC):
    """Decides how many rollouts each prompt of a batch gets. Derive from it and name yours as `kind: module:Class`.

    A pure function of the statistics: the counts depend on the arguments and the configuration alone, never on random
    numbers, the time or earlier calls. So a resumed run and a replay give the same counts. `contract.py` tests
    everything that is required of an allocator; the counts are also checked in every step of a run.
    """

    forgets = True  # False: observations keep their full weight, whatever `half_life` says

    def __init__(self, config: AllocationConfig) -> None:
        self.config = config

    def variance(self, prompts: Statistics, pool: Statistics) -> np.ndarray:
        """Returns what `counts` decides by, finite float64 [N], 0 or above; logged as `variance` in allocation.jsonl.

        `prompts`: those of the batch. `pool`: all prompts observed so far. Unless overridden: the expected variance of
        a rollout by `config.variance`.
        """
        return expected_variance(self.config.variance, prompts, pool)

    @abstractmethod
    def counts(self, prompts: Statistics, variance: np.ndarray, budget: int, low: int, high: int) -> np.ndarray:
        """Rollouts of each of N >= 1 prompts, int64 [N] with sum `budget` and low <= n <= high.

        The caller ensures N low <= budget <= N high and low >= 1.
        """
