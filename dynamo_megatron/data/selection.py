"""Chooses the prompts of each step: the stream's next prompts, or some of them by rollouts before this step alone
(`data.selection`)."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dynamo_megatron.algorithm.advantages import informative
from dynamo_megatron.algorithm.arrays import group_index
from dynamo_megatron.algorithm.history import History
from dynamo_megatron.algorithm.success import success_rate
from dynamo_megatron.config import DataConfig
from dynamo_megatron.data.stream import PromptStream
from dynamo_megatron.runtime.seeds import derived_seed
from dynamo_megatron.types import Prompt, RolloutBatch

# GRESO as its public code runs it (Infini-AI-Lab/GRESO): the base probability at the start, its change per step, its
# bounds, the least probability with which a prompt is drawn, and the share of the target that is for solved groups.
GRESO_START, GRESO_STEP, GRESO_BOUNDS, GRESO_LEAST, GRESO_EASY = 0.5, 0.01, (0.05, 0.95), 0.01, 1 / 3


class PromptSelection:
    """Draws the stream's next prompts: `kind: uniform`. The draw of any kind depends on the stream's position, the
    contents of `history`, `config.shuffle_seed`, the step and the round, so a resumed run draws the same prompts.
    `stream` and `state_dict` are saved separately.
    """

    def __init__(self, config: DataConfig, stream: PromptStream, history: History) -> None:
        self.config, self.stream, self.history, self._seed = config.selection, stream, history, config.shuffle_seed

    def draw(
        self, step: int, round_: int, wanted: int, on_poll: Callable[[], None], under_way: Collection[str] = ()
    ) -> list[Prompt]:
        """Returns `wanted` prompts with `tokens` and `weight` set. `under_way`: ids of prompts whose outcomes are not
        known yet. Where prompts are chosen without weights they are left out, if there are enough other candidates."""
        return self.stream.next(wanted, on_poll)

    def observe(self, step: int, rollouts: RolloutBatch) -> None:
        """Takes the outcomes of a round of `step`, after `history` has got them."""

    def metrics(self) -> dict[str, float]:
        """`data/epoch` and `data/skipped_prompts` (too long, or bad rows of a function) of the stream. Where prompts
        are chosen, also `data/candidates`, the number of candidates in the last step."""
        return {"data/epoch": self.stream.epoch, "data/skipped_prompts": self.stream.skipped}

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that is not in `history`: plain data and arrays that do not change later."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state of `state_dict`."""


class Choice(NamedTuple):
    taken: np.ndarray  # int64, ascending: indices of the candidates that are drawn
    weights: np.ndarray  # float64, for each of them: uniform probability / its own; 1 if weights are off or unknown


class Chosen(PromptSelection):
    """Draws some of the stream's next prompts, the candidates."""

    _candidates = 0

    @abstractmethod
    def choose(self, prompt_ids: Sequence[str], wanted: int, rng: np.random.Generator) -> Choice:
        """Draws at most `wanted` of the candidates `prompt_ids`, of which there are at least `wanted`."""

    def candidates(self, wanted: int) -> int:
        """Returns how many of the next prompts `choose` gets to draw `wanted`."""
        size = self.stream.size
        if self.config.candidates is None:
            assert size is not None, "a source that is read as the run goes on has no end: refused by Config"
            return max(wanted, size)
        asked = wanted * self.config.candidates
        return asked if size is None else max(wanted, min(asked, size))

    def draw(
        self, step: int, round_: int, wanted: int, on_poll: Callable[[], None], under_way: Collection[str] = ()
    ) -> list[Prompt]:
        rng = np.random.default_rng(derived_seed(self._seed, "prompt selection", str(step), str(round_)))
        if round_ == 0:
            self._candidates = 0
        drawn: list[Prompt] = []
        while (missing := wanted - len(drawn)) > 0:
            candidates = self.stream.candidates(self.candidates(missing), on_poll)
            self._candidates += len(candidates)
            distinct = {prompt.prompt_id: prompt for prompt in candidates}
            # With weights a prompt's probability must not depend on earlier draws.
            others = {id_: p for id_, p in distinct.items() if id_ not in under_way or self.config.weights}
            if len(distinct) >= missing:  # else there are fewer distinct prompts than a batch needs
                candidates = list((others if len(others) >= missing else distinct).values())
            choice = self.choose([prompt.prompt_id for prompt in candidates], missing, rng)
            for index, weight in zip(choice.taken.tolist(), choice.weights.tolist(), strict=True):
                drawn.append(dataclasses.replace(self.stream.encoded(candidates[index]), weight=weight))
        return drawn

    def metrics(self) -> dict[str, float]:
        return {**super().metrics(), "data/candidates": self._candidates}


class Priority(Chosen):
    """SPO's prioritised drawing (arXiv 2509.13232): in proportion to sqrt(p(1-p)) + `exploration`, p the expected
    success rate.

    SPO draws one prompt after the other without replacement; here each prompt is drawn with exactly the probability of
    `inclusion`. SPO's p is from a tracker that starts from 8 rollouts of every prompt, here it is `success_rate`.
    """

    def choose(self, prompt_ids: Sequence[str], wanted: int, rng: np.random.Generator) -> Choice:
        rate = success_rate(self.history.of(prompt_ids), self.history.pool())
        probability = inclusion(np.sqrt(rate * (1 - rate)) + self.config.exploration, wanted)
        taken = systematic(probability, rng)
        uniform = wanted / len(prompt_ids)
        return Choice(taken, uniform / probability[taken] if self.config.weights else np.ones(len(taken)))


class Thompson(Chosen):
    """MoPPS (arXiv 2507.04632): a success rate is sampled from every candidate's posterior, Beta(1 + right, 1 + wrong),
    and the candidates nearest to `target` are drawn.

    MoPPS's discount of earlier counts is `algorithm.allocation.half_life` (1 visit corresponds to its lambda of .5).
    """

    def choose(self, prompt_ids: Sequence[str], wanted: int, rng: np.random.Generator) -> Choice:
        seen = self.history.of(prompt_ids)
        sampled = rng.beta(1 + seen.successes, 1 + seen.trials - seen.successes)
        nearest = np.argsort(np.abs(sampled - self.config.target), kind="stable")[:wanted]
        return Choice(np.sort(nearest), np.ones(wanted))


class Greso(Chosen):
    """GRESO (arXiv 2506.02177): a prompt whose last z groups were all solved (no wrong rollout) or all unsolved (no
    right one) is drawn with probability max(q^z, .01), any other prompt always.

    Each of the two kinds has its own q, .5 at the start. After each step with prompts seen before, q falls by .01 if
    the kind's share of their groups reaches its target (a third of `zero_variance` for solved groups, the rest for
    unsolved ones), else it rises by .01. A group of one rollout is ignored. A group of equal rewards in which some
    rollouts failed counts as unsolved. GRESO's adaptive batch size is left out.
    """

    def __init__(self, config: DataConfig, stream: PromptStream, history: History) -> None:
        super().__init__(config, stream, history)
        self._streaks: dict[str, int] = {}  # for every prompt seen: its last z groups were solved (z) or unsolved (-z)
        self._base = self._started = (GRESO_START, GRESO_START)  # (solved, unsolved): now, and at the step's start
        self._step, self._again = 0, np.zeros(3)  # the step's groups of prompts seen before: all, solved, unsolved

    def candidates(self, wanted: int) -> int:
        return wanted

    def choose(self, prompt_ids: Sequence[str], wanted: int, rng: np.random.Generator) -> Choice:
        streak = np.fromiter((self._streaks.get(i, 0) for i in prompt_ids), np.int64, len(prompt_ids))
        drawn = np.maximum(np.where(streak > 0, *self._base) ** np.abs(streak), GRESO_LEAST)
        taken = np.flatnonzero(rng.random(len(prompt_ids)) < drawn)[:wanted]
        return Choice(taken, np.ones(len(taken)))

    def observe(self, step: int, rollouts: RolloutBatch) -> None:
        prompt_ids, group_ids = rollouts.prompt_ids, rollouts.group_ids
        if step != self._step:  # a step may have several rounds
            self._step, self._started, self._again = step, self._base, np.zeros(3)
        differs, (index, groups) = informative(rollouts.rewards, group_ids), group_index(group_ids, len(prompt_ids))
        right, size = np.bincount(index, rollouts.successes, minlength=groups), np.bincount(index, minlength=groups)
        firsts = np.unique(index, return_index=True)[1]
        for group, first in enumerate(firsts.tolist()):
            if size[group] == 1:
                continue
            prompt_id = prompt_ids[first]
            kind = 0 if differs[first] else 1 if right[group] == size[group] else -1
            before = self._streaks.get(prompt_id)
            if before is not None:
                self._again += (1, kind > 0, kind < 0)
            self._streaks[prompt_id] = kind + (before if before is not None and before * kind > 0 else 0)
        if self._again[0]:
            aims = self.config.zero_variance * np.array([GRESO_EASY, 1 - GRESO_EASY])
            change = np.where(self._again[1:] / self._again[0] >= aims, -GRESO_STEP, GRESO_STEP)
            self._base = tuple(np.clip(np.add(self._started, change), *GRESO_BOUNDS).tolist())

    def state_dict(self) -> dict[str, Any]:
        streaks = np.fromiter(self._streaks.values(), np.int64, len(self._streaks))
        return {"prompt_ids": list(self._streaks), "streaks": streaks, "base": list(self._base)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        streaks = np.asarray(state["streaks"]).tolist()
        self._streaks = dict(zip(state["prompt_ids"], streaks, strict=True))
        self._base = self._started = tuple(state["base"])

    def metrics(self) -> dict[str, float]:
        return {**super().metrics(), "data/draw_solved": self._base[0], "data/draw_unsolved": self._base[1]}


def open_selection(config: DataConfig, stream: PromptStream, history: History) -> PromptSelection:
    """The selection that `config.selection.kind` names."""
    kinds = {"uniform": PromptSelection, "priority": Priority, "thompson": Thompson, "greso": Greso}
    return kinds[config.selection.kind](config, stream, history)


def inclusion(weights: np.ndarray, wanted: int) -> np.ndarray:
    """Probabilities min(1, c w_i) whose sum is `wanted`, float64 [N]. weights: float64 [N] above 0; 0 < wanted <= N."""
    surely = np.zeros(len(weights), bool)
    while surely.sum() < wanted:
        share = (wanted - surely.sum()) * weights / weights[~surely].sum()
        over = ~surely & (share > 1)
        if not over.any():
            return np.where(surely, 1.0, share)
        surely |= over
    return surely.astype(np.float64)


def systematic(probability: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draws indices, int64, ascending; each i with probability exactly `probability[i]`, float64 [N], whose sum must be
    a whole number: systematic sampling (Madow, 1949) in a random order."""
    order = rng.permutation(len(probability))
    edges = np.cumsum(probability[order])
    marks = rng.random() + np.arange(round(edges[-1]))
    return np.sort(order[np.minimum(np.searchsorted(edges, marks, side="right"), len(order) - 1)])
