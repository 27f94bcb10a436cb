"""The counts that allocators would have given, and measures of them: pure functions of a record.

A visit is a dispatch of a prompt in a step. There are V visits, in the order of steps and batches. p is the success
rate of a visit's prompt over the whole record. It is known only afterwards, and averages over a policy that changed.
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
    """A visit whose recorded count differs from the count of a replay."""

    step: int
    prompt_id: str
    given: int
    replayed: int


def replay(
    steps: Sequence[RecordedStep], config: AllocationConfig, strata: Mapping[str, Hashable] | None = None
) -> np.ndarray:
    """Rollouts for every visit, int64 [V], by an allocator that observes the record as in training.

    Before a step the allocator has observed the rollouts of the earlier steps; if the run sampled ahead, of the steps
    that were trained on by then. It observes what was sampled, even where it would have requested other counts. Its
    budget is the step's. `strata` and errors: as for `RolloutAllocator`.
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
    """The recorded count of every visit, int64 [V]."""
    return np.concatenate([step.given for step in steps])


def first_difference(steps: Sequence[RecordedStep], counts: np.ndarray) -> Difference | None:
    """The first visit whose recorded count differs from `counts`, int64 [V]; None where there is none."""
    recorded = given(steps)
    if not (other := np.flatnonzero(recorded != counts)).size:
        return None
    visit = int(other[0])
    step, prompt_id = [(step.step, prompt_id) for step in steps for prompt_id in step.prompt_ids][visit]
    return Difference(step, prompt_id, int(recorded[visit]), int(counts[visit]))


def success_rates(steps: Sequence[RecordedStep]) -> np.ndarray:
    """p of every visit, float64 [V]. A prompt without rollouts gets the rate of all rollouts."""
    trials: Counter[str] = Counter()
    won: Counter[str] = Counter()
    for step in steps:
        for i, success in zip(step.dispatch, step.successes, strict=True):
            trials[step.prompt_ids[i]] += 1
            won[step.prompt_ids[i]] += int(success)
    overall = won.total() / max(trials.total(), 1)
    return np.array([won[i] / trials[i] if trials[i] else overall for step in steps for i in step.prompt_ids])


def oracle(steps: Sequence[RecordedStep], rates: np.ndarray, config: AllocationConfig) -> np.ndarray:
    """The counts, int64 [V], that minimise the sum of p(1-p)/n in every step, under its budget and the bounds."""
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
    """The probability that all of n rollouts succeed or all fail, p^n + (1-p)^n, float64 [V]."""
    return rates**counts + (1 - rates) ** counts
