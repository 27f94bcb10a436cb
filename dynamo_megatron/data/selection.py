"""Chooses the prompts of each step: the stream's next prompts, or some of them (`data.selection`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from dynamo_megatron.algorithm.history import History
from dynamo_megatron.algorithm.prompt_selection import RULES
from dynamo_megatron.config import DataConfig
from dynamo_megatron.data.stream import IteratorStream, PromptStream
from dynamo_megatron.runtime.seeds import derived_seed
from dynamo_megatron.types import Prompt, RolloutBatch


class PromptSelection:
    """Draws the prompts of each step. The draw depends on the stream's position, the contents of `history`,
    `config.shuffle_seed`, the step and the round, so a resumed run draws the same prompts. `stream` and `state_dict`
    are saved separately.
    """

    def __init__(self, config: DataConfig, stream: PromptStream | IteratorStream, history: History) -> None:
        kind = config.selection.kind
        self.stream = stream
        self._seed = config.shuffle_seed
        self._rule = None if kind == "uniform" else RULES[kind](config.selection, history)
        self._weighs = config.selection.weights  # a prompt's probability must not depend on earlier draws
        self._candidates = 0

    def draw(
        self,
        step: int,
        round_: int,
        wanted: int,
        on_poll: Callable[[], None],
        under_way: Collection[str] = (),
    ) -> list[Prompt]:
        """Returns `wanted` prompts with `tokens` and `weight` set. `under_way`: ids of prompts whose outcomes the rule
        does not know yet. Without weights they are left out, where there are enough other candidates."""
        if self._rule is None:
            return self.stream.next(wanted, on_poll)
        rng = np.random.default_rng(derived_seed(self._seed, "prompt selection", str(step), str(round_)))
        if round_ == 0:
            self._candidates = 0
        drawn: list[Prompt] = []
        while (missing := wanted - len(drawn)) > 0:
            candidates = self.stream.candidates(self._rule.candidates(missing, self.stream.size), on_poll)
            self._candidates += len(candidates)
            distinct = {prompt.prompt_id: prompt for prompt in candidates}
            others = {id_: prompt for id_, prompt in distinct.items() if id_ not in under_way or self._weighs}
            if len(distinct) >= missing:  # else there are fewer distinct prompts than a batch needs
                candidates = list((others if len(others) >= missing else distinct).values())
            choice = self._rule.choose([prompt.prompt_id for prompt in candidates], missing, rng)
            for index, weight in zip(choice.taken.tolist(), choice.weights.tolist(), strict=True):
                drawn.append(dataclasses.replace(self.stream.encoded(candidates[index]), weight=weight))
        return drawn

    def observe(self, step: int, rollouts: RolloutBatch) -> None:
        """Passes the outcomes of a round of `step` to the rule, after `history` has got them."""
        if self._rule is not None:
            self._rule.observe(step, rollouts.prompt_ids, rollouts.group_ids, rollouts.rewards, rollouts.successes)

    def metrics(self) -> dict[str, float]:
        """`data/epoch` and `data/skipped_prompts` (too long, or bad rows of a function) of the stream. Where prompts
        are chosen, also `data/candidates`, the number of candidates in the last step, and the rule's metrics."""
        where = {"data/epoch": self.stream.epoch, "data/skipped_prompts": self.stream.skipped}
        return where if self._rule is None else {**where, "data/candidates": self._candidates, **self._rule.metrics()}

    def state_dict(self) -> dict[str, Any]:
        return {} if self._rule is None else self._rule.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._rule is not None:
            self._rule.load_state_dict(state)
