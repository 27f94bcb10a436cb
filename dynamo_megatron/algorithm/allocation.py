"""Which prompt gets how many rollouts: the interface to the allocators and to the history that they read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dynamo_megatron.algorithm.allocators import load_allocator, neyman, waterfill
from dynamo_megatron.algorithm.arrays import described
from dynamo_megatron.algorithm.history import COLUMNS, History, checked
from dynamo_megatron.algorithm.success import Baseline, shrunk, success_variance, variance_within
from dynamo_megatron.config import AllocationConfig
from dynamo_megatron.errors import InputError

__all__ = ["Allocation", "RolloutAllocator", "neyman", "success_variance", "waterfill"]


@dataclass(frozen=True)
class Allocation:
    """One step's allocation, aligned with `prompt_ids`."""

    step: int
    prompt_ids: list[str]
    counts: np.ndarray  # int64 [N]
    variance: np.ndarray  # float64 [N], from the allocator's method `variance`
    history: np.ndarray  # bool [N], the prompt was observed before

    def rows(self) -> Iterator[dict[str, Any]]:
        """The lines of allocation.jsonl."""
        columns = (self.prompt_ids, self.counts.tolist(), self.variance.tolist(), self.history.tolist())
        for prompt_id, n, variance, history in zip(*columns, strict=True):
            yield {"step": self.step, "prompt_id": prompt_id, "n": n, "variance": variance, "history": history}


class RolloutAllocator:
    """Allocates a step's rollouts to prompts from what their earlier rollouts showed (DynaMO, arXiv 2602.19208).

    `config` is an AllocationConfig or a mapping of its keys. The weight of observations decays with a half-life in
    visits (a visit is one `observe` that contains the prompt), except for allocators that never forget. The same calls
    give the same counts.
    """

    def __init__(self, config: AllocationConfig | Mapping[str, Any]) -> None:
        self.config = AllocationConfig.model_validate(config)
        self.last: Allocation | None = None
        self._allocator = load_allocator(self.config.kind)(self.config)
        self.history = History()

    def allocate(self, prompt_ids: Sequence[str], budget: int, *, step: int) -> np.ndarray:
        """Returns only the counts of `decide`, int64 [N]. `last` keeps the whole decision."""
        self.last = self.decide(prompt_ids, budget, step=step)
        return self.last.counts

    def decide(self, prompt_ids: Sequence[str], budget: int, *, step: int) -> Allocation:
        """Decides how many rollouts each prompt gets, aligned with `prompt_ids`, in which a prompt may occur twice.

        The counts' sum is `budget`, and each is within the configured bounds (`on_shortfall`: where that is not
        possible). Raises ValueError naming a user's allocator that does not keep its contract.
        """
        ids = list(prompt_ids)
        budget, low, high = self.config.fit(len(ids), budget)
        prompts = self.history.of(ids)
        variance, counts = np.zeros(0), np.zeros(0, np.int64)
        if ids:
            variance = self._allocator.variance(prompts, self.history.pool())
            self._check("variance", variance, "float64", ids, 0, math.inf)
            counts = self._allocator.counts(prompts, variance, budget, low, high)
            self._check("counts", counts, "int64", ids, low, high)
            self._hold(counts.sum() == budget, f"gave {counts.sum()} rollouts in all for a budget of {budget}")
        return Allocation(step, ids, counts, variance, prompts.trials > 0)

    def _check(self, name: str, value: Any, dtype: str, ids: list[str], least: int, most: float) -> None:
        """Raises InputError unless `value` is an array of `dtype` with an entry for each of `ids` within the bounds."""
        wanted = f"{dtype} ({len(ids)},)"
        self._hold(described(value) == wanted, f"{name} returned {described(value)}, not a numpy array of {wanted}")
        if (bad := np.flatnonzero(~((value >= least) & (value <= most) & np.isfinite(value)))).size:
            self._hold(False, f"{name} of prompt {ids[bad[0]]!r} is {value[bad[0]]}, outside [{least}, {most}]")

    def _hold(self, kept: bool, broken: str) -> None:
        if not kept:
            raise InputError(f"algorithm.allocation.kind: {self.config.kind}: {broken}")

    def baseline(self, prompt_ids: Sequence[str], prior_strength: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
        """Returns (mean, strength), float64 [N] each: a prompt's expected reward, from its earlier rollouts shrunk to
        the pool, and how many rollouts it counts as. Both are 0 if nothing was observed at all."""
        known = self.reward_baseline(prompt_ids, prior_strength)
        return known.mean, known.strength

    def reward_baseline(
        self, prompt_ids: Sequence[str], prior_strength: float = 1.0, score_ratio: float | None = 1.0
    ) -> Baseline:
        """As `baseline`, with the further values of the optimal baseline. `score_ratio` None: as measured so far."""
        pool = self.history.pool()
        known = shrunk(self.history.of(list(prompt_ids)), pool, prior_strength, variance_within(pool))
        ratio = self.history.energy_line.score_ratio if score_ratio is None else score_ratio
        return replace(known, score_ratio=ratio)

    def observe(
        self,
        prompt_ids: Sequence[str],
        rewards: Sequence[float],
        successes: Sequence[bool],
        step: int,
        energy: Sequence[float] | None = None,
    ) -> None:
        """Adds finished rollouts to the history, one entry each, in any order: float [S] rewards, bool [S] successes.

        `energy`, float [S]: from `algorithm.energy.rollout_energies`. None: unknown. Raises ValueError naming the
        argument, or the prompt whose entry is not finite or out of range.
        """
        ids, by_visit = list(prompt_ids), 0.5 ** (1 / self.config.half_life)
        observed = checked(ids, rewards, successes, step, energy)
        keep = by_visit if self._allocator.forgets else 1.0
        self.history.observe(ids, observed, keep)
        if ids and energy is not None:
            line = self.history.energy_line
            self.history.energy_line = line.after(observed["rewards"], observed["energy"], by_visit)

    def state_dict(self) -> dict[str, Any]:
        """Returns plain data that survives JSON: prompt_ids; for each column of `History` a number per prompt; and
        energy_line and rewards_outside, of all prompts together."""
        state = dict(self.history.state_dict())
        columns = {name: state.pop(name).tolist() for name in (*COLUMNS, "energy_line")}
        return {**state, "prompt_ids": list(state["prompt_ids"]), **columns}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces the history. Raises ValueError naming the prompt whose statistics contradict each other."""
        self.history.load_state_dict(state)
