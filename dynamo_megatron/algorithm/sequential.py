"""Rules that use a step's own outcomes: after each of its rounds they decide which prompts get further rollouts.

That biases the gradient (docs/concepts.md), except with `pilot` and `explore`. The rules are pure functions of what the
step has sampled so far: a step that is sampled again, or resumed in its middle, makes the same decisions.
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
    round: np.ndarray  # int64 [S]: the round of each rollout, from 0
    success: np.ndarray  # bool [S]

    def tally(self, chosen: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(right, wrong), int64 [N] each: each prompt's number of rollouts, among all or among `chosen`, bool [S]."""
        counted = np.ones(len(self.prompt), bool) if chosen is None else chosen
        right, wrong = (
            np.bincount(self.prompt[counted & kind], minlength=len(self.asked))
            for kind in (self.success, ~self.success)
        )
        return right, wrong


class NextRound(NamedTuple):
    prompts: np.ndarray  # int64 [M], ascending: indices of the step's prompts that get further rollouts
    budget: int  # rollouts of these prompts together, spread evenly


class Trained(NamedTuple):
    rows: np.ndarray  # int64 [K], ascending: the rollouts that are trained on
    weights: np.ndarray | None  # float64 [K], factors of their prompts' weights; None: 1


class SequentialRule:
    """`budget`: rollouts of a step. `low`, `high`: the fewest and the most rollouts of a prompt. The methods' `chance`:
    float64 [N] in [0, 1), drawn before the step for each of its prompts."""

    def __init__(self, config: SequentialConfig, budget: int, low: int, high: int) -> None:
        self.config, self.budget, self.low, self.high = config, budget, low, high

    @property
    def merges(self) -> bool:
        """Whether a prompt's rollouts of all rounds form one group; if not, those of each round do."""
        return not self.config.explore

    def next_round(self, seen: Outcomes, chance: np.ndarray) -> NextRound | None:
        """Returns the round after `seen.rounds` rounds (at least one); None if the step needs no further one."""
        prompts, budget = (self._committed if self.config.kind == "pilot" else self._unfinished)(seen, chance)
        return NextRound(prompts, budget) if budget else None

    def trained(self, seen: Outcomes) -> Trained:
        """Selects what a step trains on after its last round: something if there is any rollout."""
        if self.config.kind == "reinforce_ada":
            return Trained(np.flatnonzero(self._kept(seen)), None)
        if not self.config.explore:
            committed = seen.asked > self.config.round_n
            rows = np.flatnonzero(committed[seen.prompt])
            return Trained(rows if len(rows) else np.arange(len(seen.prompt)), None)
        return Trained(np.arange(len(seen.prompt)), self._unbiased_weights(seen))

    # -- pilot: Pilot-Commit (arXiv 2605.26606; code databricks/pilot-commit, recipe/pc) -------------------------------
    def _passed(self, seen: Outcomes) -> np.ndarray:
        """Whether a prompt's first round has a success rate from `lower` to 1 - `upper`, bool [N]."""
        right, wrong = seen.tally(seen.round == 0)
        came = np.maximum(right + wrong, 1)
        return (right + wrong > 0) & (right / came >= self.config.lower) & (wrong / came >= self.config.upper)

    def _committed(self, seen: Outcomes, chance: np.ndarray) -> tuple[np.ndarray, int]:
        """The rest of the budget goes to the prompts that pass or that `explore` selects: to each at least `low`, at
        most `high` minus the first round's rollouts. If it is too small for all, the first in the batch get it."""
        if seen.rounds > 1:
            return np.zeros(0, np.int64), 0
        rest = self.budget - int(seen.asked.sum())
        chosen = np.flatnonzero(self._passed(seen) | (chance < self.config.explore))[: rest // self.low]
        return chosen, min(rest, len(chosen) * (self.high - self.config.round_n))

    def _unbiased_weights(self, seen: Outcomes) -> np.ndarray:
        """Weights with which the mean over the groups of both rounds has the mean over prompts of g_i (prompt i's
        gradient) as its expectation: share * first round's estimate + (1 - share) * second round's / (probability of a
        second round). Each estimate of g_i is unbiased whatever came before; `share` is equal for all prompts."""
        first = seen.round == 0
        prompts = len(np.unique(seen.prompt[first]))
        groups = prompts + len(np.unique(seen.prompt[~first]))
        share = self.config.round_n * len(seen.asked) / self.budget
        chance = np.where(self._passed(seen), 1.0, self.config.explore)
        return np.where(first, share, (1 - share) / chance[seen.prompt]) * groups / prompts

    # -- reinforce_ada: Reinforce-Ada (arXiv 2510.04996; code RLHFlow/Reinforce-Ada) -----------------------------------
    def _unfinished(self, seen: Outcomes, chance: np.ndarray) -> tuple[np.ndarray, int]:
        """`round_n` more rollouts, whatever the budget, for each prompt that does not meet the condition `exit`, up to
        `high` in all."""
        right, wrong = seen.tally()
        if self.config.exit == "balanced":
            half = self.config.keep // 2
            done = (right >= half) & (wrong >= self.config.keep - half)
        else:
            done = right > 0
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
