"""Evaluates the objective of each kind of allocator on any counts, with statistics of the whole record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dynamo_megatron.algorithm.allocators.gvm import ALPHA, BETA
from dynamo_megatron.algorithm.energy_variance import measured_energies
from dynamo_megatron.algorithm.history import History, Observed
from dynamo_megatron.algorithm.success import expected_tokens
from dynamo_megatron.replay.recording import RecordedStep

# name -> formula; lower is better, except for knapsack
OBJECTIVES = {
    "gradient": "sum of s^2/n, s^2 the measured variance of a prompt's gradient, over visits to measured prompts",
    "energy": "sum of p (1-p)^2 S1/n + p^2 (1-p) S0/n, the variance of `variance: energy` (S1, S0: mean energies)",
    "tokens": "sum of n times a prompt's mean response tokens",
    "knapsack": "sum of (1 - p^n - (1-p)^n) p (1-p)^2: the more, the better",
    "cero": "sum of p(1-p)/(x + 1), x a prompt's rollouts over the whole record",
    "gvm": "sum of S1/(p + alpha/p)/n, over visits to prompts with a right rollout",
    "cures": "sum of sigma^2/n, sigma^2 = p(1-p) ((1-p) sqrt(S1) + p sqrt(S0))^2",
}


class Objectives:
    """The objectives on one record. `rates`: the success rate over the record of every visit's prompt, float64 [V].
    `gradients`: prompt_id -> s^2, as measured."""

    def __init__(self, steps: Sequence[RecordedStep], rates: np.ndarray, gradients: Mapping[str, float]) -> None:
        history = History()
        for step in steps:
            ids = [step.prompt_ids[i] for i in step.dispatch]
            seen = Observed.of(ids, step.rewards, step.successes, step.step, step.energy, step.lengths)
            history.observe(seen, keep=1.0)
        ids = [prompt_id for step in steps for prompt_id in step.prompt_ids]
        prompts, pool = history.of(ids), history.pool()
        self._rates = rates
        self._right, self._wrong = measured_energies(prompts, pool)
        self._tokens = expected_tokens(prompts, pool)
        self._gradient = np.array([gradients.get(prompt_id, 0.0) for prompt_id in ids])
        _, self._prompt = np.unique(ids, return_inverse=True)
        measured = pool.energy_right_trials.sum() + pool.energy_wrong_trials.sum() > 0
        self._unknown = (() if measured else ("energy", "gvm", "cures")) + (() if pool.tokens.any() else ("tokens",))
        self._unknown += () if gradients else ("gradient",)

    def of(self, counts: np.ndarray) -> dict[str, float | None]:
        """The objectives of `counts`, int64 [V], by name; None where the record lacks what it needs."""
        p, q, right, wrong = self._rates, 1 - self._rates, self._right, self._wrong
        solved = p > 0
        safe = np.where(solved, p, 1.0)
        total = np.bincount(self._prompt, counts)[self._prompt]
        visits = np.bincount(self._prompt)[self._prompt]
        found = {
            "gradient": self._gradient / counts,
            "energy": (p * q**2 * right + p**2 * q * wrong) / counts,
            "tokens": counts * self._tokens,
            "knapsack": (1 - p**counts - q**counts) * p * q**2,
            "cero": p * q / (total + 1) / visits,
            "gvm": np.where(solved, right / (safe + ALPHA / safe ** (BETA - 1)), 0.0) / counts,
            "cures": p * q * (q * np.sqrt(right) + p * np.sqrt(wrong)) ** 2 / counts,
        }
        return {name: None if name in self._unknown else float(found[name].sum()) for name in OBJECTIVES}
