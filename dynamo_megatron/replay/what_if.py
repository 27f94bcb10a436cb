"""What allocators would have given, and what that would have been worth: pure functions of a record.

A visit is a dispatch of a prompt in a step; V of them, in the order of steps and batches. p is the success rate of a
visit's prompt over the whole record: known only afterwards, and of a policy that changed on the way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dynamo_megatron.algorithm.allocation import RolloutAllocator, neyman
from dynamo_megatron.config import AllocationConfig
from dynamo_megatron.replay.recording import RecordedStep


class Difference(NamedTuple):
    """A visit that was given another number of rollouts than a replay gives it."""

    step: int
    prompt_id: str
    given: int
    replayed: int


def replay(
    steps: Sequence[RecordedStep], config: AllocationConfig, strata: Mapping[str, Hashable] | None = None
) -> np.ndarray:
    """Rollouts for every visit, int64 [V], by an allocator that sees the record as it would have in training.

    Before a step it has observed the rollouts of the earlier ones, of a run that samples ahead those that were trained
    on by then: what was sampled, whatever it would have asked for. Its budget is the step's. `strata`: as for
    `RolloutAllocator`. Raises ValueError as `RolloutAllocator`.
    """
    allocator, counts, observed = RolloutAllocator(config, strata), [], 0
    for index, step in enumerate(steps):
        while observed < index and (step.version is None or steps[observed].step <= step.version):
            seen = steps[observed]
            ids = [seen.prompt_ids[i] for i in seen.dispatch]
            allocator.observe(ids, seen.rewards, seen.successes, seen.step, seen.energy, seen.lengths)
            observed += 1
        counts.append(allocator.allocate(step.prompt_ids, step.budget, step=step.step))
    return np.concatenate(counts)


def given(steps: Sequence[RecordedStep]) -> np.ndarray:
    """Rollouts that every visit was given, int64 [V]."""
    return np.concatenate([step.given for step in steps])


def first_difference(steps: Sequence[RecordedStep], counts: np.ndarray) -> Difference | None:
    """The first visit that was given something else than `counts`, int64 [V]."""
    place = 0
    for step in steps:
        replayed = counts[place : place + len(step.given)]
        if (other := np.flatnonzero(replayed != step.given)).size:
            i = other[0]
            return Difference(step.step, step.prompt_ids[i], int(step.given[i]), int(replayed[i]))
        place += len(step.given)
    return None


def success_rates(steps: Sequence[RecordedStep]) -> np.ndarray:
    """p of every visit, float64 [V]. The rate of all rollouts stands in for a prompt that has none."""
    trials: Counter[str] = Counter()
    won: Counter[str] = Counter()
    for step in steps:
        for i, success in zip(step.dispatch, step.successes, strict=True):
            trials[step.prompt_ids[i]] += 1
            won[step.prompt_ids[i]] += int(success)
    overall = won.total() / max(trials.total(), 1)
    return np.array([won[i] / trials[i] if trials[i] else overall for step in steps for i in step.prompt_ids])


def oracle(steps: Sequence[RecordedStep], rates: np.ndarray, config: AllocationConfig) -> np.ndarray:
    """The counts with the least sum of p(1-p)/n in every step under its budget and the bounds, int64 [V]."""
    counts, place = [], 0
    for step in steps:
        p = rates[place : place + len(step.prompt_ids)]
        place += len(p)
        variance = p * (1 - p)
        counts.append(neyman(variance if variance.any() else np.ones(len(p)), *config.fit(len(p), step.budget)))
    return np.concatenate(counts)


def expected_variance(rates: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """p(1-p)/n, float64 [V]: the variance of the mean of n rewards that are 1 with probability p, else 0."""
    return rates * (1 - rates) / counts


def degenerate_chance(rates: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The chance that all of n rollouts succeed or all fail, p^n + (1-p)^n, float64 [V]."""
    return rates**counts + (1 - rates) ** counts


def degenerate_share(steps: Sequence[RecordedStep]) -> float:
    """Share of the recorded groups whose rewards are all equal; a visit without rollouts is no group."""
    equal = []
    for step in steps:
        low, high = np.full(len(step.given), np.inf), np.full(len(step.given), -np.inf)
        np.minimum.at(low, step.dispatch, step.rewards)
        np.maximum.at(high, step.dispatch, step.rewards)
        equal.extend((low == high)[low <= high])
    return float(np.mean(equal))


def rank_correlation(x: np.ndarray, y: np.ndarray) -> float | None:
    """Spearman's, ties by mean rank, of [V] and [V]; None where either has one value only."""
    ranks = []
    for values in (x, y):
        _, place, times = np.unique(values, return_inverse=True, return_counts=True)
        if len(times) < 2:
            return None
        ranks.append((np.cumsum(times) - (times - 1) / 2)[place])
    return float(np.corrcoef(*ranks)[0, 1])
