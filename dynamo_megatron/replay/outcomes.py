"""Replays every allocator on a record: the numbers that the tables, the JSON file and the picture show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dynamo_megatron.config import AllocationConfig
from dynamo_megatron.replay import rounds, what_if
from dynamo_megatron.replay.allocators import base_allocator, parse_allocator
from dynamo_megatron.replay.objectives import Objectives
from dynamo_megatron.replay.recording import Recording
from dynamo_megatron.replay.what_if import Difference

DEFAULT_ALLOCATORS = ("uniform", "waterfill", "neyman", "neyman,variance=energy", "knapsack", "cero", "gvm", "cures")


@dataclass(frozen=True)
class Outcomes:
    """`counts`: name -> rollouts of every visit, int64 [V]. The names are the record, the allocators and the oracle."""

    recording: Recording
    base: AllocationConfig  # from `base_allocator`
    counts: dict[str, np.ndarray]
    configs: dict[str, AllocationConfig]  # of those names that are allocators
    rates: np.ndarray  # float64 [V], success rate of the visit's prompt over the record
    uniform: np.ndarray  # int64 [V], the counts of the uniform allocator
    checked: bool  # the run's own allocator was replayed and compared with the record
    difference: Difference | None  # the first visit where this replay differs from the record

    def variance(self, counts: np.ndarray) -> np.ndarray:
        """Expected variance of every step, float64 [steps]: sum of p(1-p)/n over its visits."""
        return np.bincount(self.recording.step_index, what_if.expected_variance(self.rates, counts))

    @property
    def energies(self) -> bool:
        """True where the record has estimates of the rollouts' energies."""
        return any(step.energy is not None for step in self.recording.steps)

    @cached_property
    def degenerate_share(self) -> float:
        """The share of the sampled groups whose rewards are all equal."""
        return what_if.degenerate_share(self.recording.steps)

    @cached_property
    def rounds(self) -> dict[str, dict[str, float]]:
        """name -> the numbers of `replay.rounds`, for all `counts` and for the rules that use a step's outcomes."""
        before = {name: rounds.one_round(self.rates, counts) for name, counts in self.counts.items()}
        return before | rounds.rounds(self.recording.steps, self.rates)

    @cached_property
    def measures(self) -> dict[str, dict[str, Any]]:
        """name -> plain numbers; None where there is nothing to compare."""
        least = self.variance(self.counts["oracle"]).sum()
        even = self.variance(self.uniform).sum()
        objectives = Objectives(self.recording.steps, self.rates, self.recording.gradients)
        evenly = objectives.of(self.uniform)
        found = {}
        for name, counts in self.counts.items():
            variance = self.variance(counts)
            found[name] = {
                "rollouts": int(counts.sum()),
                "expected_variance": float(variance.mean()),
                "to_uniform": float(variance.sum() / even) if even else None,
                "to_oracle": float(variance.sum() / least) if least else None,
                "degenerate_expected": float(what_if.degenerate_chance(self.rates, counts).mean()),
                "rank_correlation": what_if.rank_correlation(counts, 1 - self.rates),
                "objectives_to_uniform": {
                    key: value / evenly[key] if evenly[key] else None for key, value in objectives.of(counts).items()
                },
            }
        return found


def by_energy(config: AllocationConfig) -> bool:
    """Returns True where the allocator uses the energies of rollouts."""
    return config.kind in ("gvm", "cures") or config.variance == "energy"


def outcomes(recording: Recording, asked: Sequence[str] | None) -> Outcomes:
    """Replays the allocators `asked` (None: DEFAULT_ALLOCATORS), beside the recorded counts and the oracle.

    Raises ValueError for an allocator that cannot be parsed or does not fit the budget.
    """
    steps, base = recording.steps, base_allocator(recording)
    ours = recording.trainer == "dynamo-megatron"
    # Not reproducible: a record has only estimates of energies, and with cost: tokens not the step's budget in tokens.
    checked = ours and not by_energy(base) and base.cost == "rollouts"
    rates, recorded = what_if.success_rates(steps), what_if.given(steps)
    difference = what_if.first_difference(steps, what_if.replay(steps, base, recording.strata)) if checked else None
    uniform = parse_allocator("uniform", recording)
    counts = {f"as recorded ({base.kind})" if ours else "as recorded": recorded}
    configs: dict[str, AllocationConfig] = {}
    for text in asked if asked else DEFAULT_ALLOCATORS:
        config = parse_allocator(text, recording)
        same_as_recorded = checked and difference is None and config == base
        if not same_as_recorded and config not in configs.values():
            configs[text] = config
            counts[text] = what_if.replay(steps, config, recording.strata)
    counts["oracle"] = what_if.oracle(steps, rates, base)
    return Outcomes(
        recording, base, counts, configs, rates, what_if.replay(steps, uniform, recording.strata), checked, difference
    )
