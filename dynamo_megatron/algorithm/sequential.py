"""Rules that use a step's own outcomes: after each of its rounds they decide which prompts get further rollouts.

That biases the gradient (docs/allocation.md). The rules are pure functions of what the step has sampled so far: a step
that is sampled again, or resumed in its middle, makes the same decisions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dynamo_megatron.config.method import SequentialConfig


@dataclass(frozen=True)
class Outcomes:
    """The S rollouts that a step has so far of its N prompts. A prompt drawn twice counts as two."""

    asked: np.ndarray  # int64 [N]: rollouts requested, including those that failed
    rounds: int  # sampled so far
    prompt: np.ndarray  # int64 [S]: the index of each rollout's prompt
    success: np.ndarray  # bool [S]

    def tally(self) -> tuple[np.ndarray, np.ndarray]:
        """(right, wrong), int64 [N] each: each prompt's number of rollouts."""
        right = np.bincount(self.prompt[self.success], minlength=len(self.asked))
        return right, np.bincount(self.prompt, minlength=len(self.asked)) - right


class NextRound(NamedTuple):
    prompts: np.ndarray  # int64 [M], ascending: indices of the step's prompts that get further rollouts
    budget: int  # rollouts of these prompts together, spread evenly


class SequentialRule:
    """`budget`: rollouts of a step. `low`, `high`: the fewest and the most rollouts of a prompt."""

    def __init__(self, config: SequentialConfig, budget: int, low: int, high: int) -> None:
        self.config, self.budget, self.low, self.high = config, budget, low, high

    def next_round(self, seen: Outcomes) -> NextRound | None:
        """Returns the round after `seen.rounds` rounds (at least one); None if the step needs no further one."""
        prompts, budget = (self._committed if self.config.kind == "pilot" else self._unfinished)(seen)
        return NextRound(prompts, budget) if budget else None

    def trained(self, seen: Outcomes) -> np.ndarray:
        """The rollouts that a step trains on after its last round, int64 [K], ascending: some if there are any."""
        if self.config.kind == "reinforce_ada":
            return np.flatnonzero(self._kept(seen))
        committed = seen.asked > self.config.round_n
        rows = np.flatnonzero(committed[seen.prompt])
        return rows if len(rows) else np.arange(len(seen.prompt))

    # -- pilot: Pilot-Commit (arXiv 2605.26606; code databricks/pilot-commit, recipe/pc) -------------------------------
    def _committed(self, seen: Outcomes) -> tuple[np.ndarray, int]:
        """The rest of the budget goes to the prompts with a success rate from `lower` to 1 - `upper`: to each at least
        `low`, at most `high` minus the first round's rollouts. If it is too small for all, the first in the batch get
        it."""
        if seen.rounds > 1:
            return np.zeros(0, np.int64), 0
        right, wrong = seen.tally()
        came = np.maximum(right + wrong, 1)
        passed = (right + wrong > 0) & (right / came >= self.config.lower) & (wrong / came >= self.config.upper)
        rest = self.budget - int(seen.asked.sum())
        chosen = np.flatnonzero(passed)[: rest // self.low]
        return chosen, min(rest, len(chosen) * (self.high - self.config.round_n))

    # -- reinforce_ada: Reinforce-Ada (arXiv 2510.04996; code RLHFlow/Reinforce-Ada) -----------------------------------
    def _unfinished(self, seen: Outcomes) -> tuple[np.ndarray, int]:
        """`round_n` more rollouts, whatever the budget, for each prompt without `keep` / 2 right and `keep` / 2 wrong
        ones, up to `high` in all."""
        right, wrong = seen.tally()
        half = self.config.keep // 2
        done = (right >= half) & (wrong >= self.config.keep - half)
        active = np.flatnonzero(~done & (seen.asked < self.high))
        return active, len(active) * self.config.round_n

    def _kept(self, seen: Outcomes) -> np.ndarray:
        """bool [S]: the first `keep` / 2 right and as many wrong rollouts of each prompt; if one kind has fewer, more
        of the other."""
        right, wrong = seen.tally()
        half = np.minimum(self.config.keep // 2, right)
        wrong_kept = np.minimum(self.config.keep - half, wrong)
        right_kept = np.minimum(self.config.keep - wrong_kept, right)
        kept = np.zeros(len(seen.prompt), bool)
        for kind, most in ((seen.success, right_kept), (~seen.success, wrong_kept)):
            rows = np.flatnonzero(kind)
            rows = rows[np.argsort(seen.prompt[rows], kind="stable")]
            prompt = seen.prompt[rows]
            place = np.arange(len(rows)) - np.searchsorted(prompt, prompt)  # among those of its prompt and kind
            kept[rows[place < most[prompt]]] = True
        return kept
