"""Chooses the prompts of each step: the stream's next prompts, or some of them by rollouts before this step alone
(`data.selection`)."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from dynamo_megatron.algorithm.history import History
from dynamo_megatron.algorithm.success import success_rate
from dynamo_megatron.config import DataConfig
from dynamo_megatron.data.stream import PromptStream
from dynamo_megatron.runtime.seeds import derived_seed
from dynamo_megatron.types import Prompt


class PromptSelection:
    """Draws the stream's next prompts (`kind: uniform`), or some of them (`priority`): SPO's prioritised drawing
    (arXiv 2509.13232), one after the other without replacement, in proportion to sqrt(p(1-p)) + `exploration`, p the
    expected success rate.

    SPO's p is from a tracker that starts from 8 rollouts of every prompt, here it is `success_rate`. A draw depends on
    the stream's position, the contents of `history`, `config.shuffle_seed`, the step and the round, so a resumed run
    draws the same prompts.
    """

    def __init__(self, config: DataConfig, stream: PromptStream, history: History) -> None:
        self._config, self.stream, self._history, self._seed = config.selection, stream, history, config.shuffle_seed

    def draw(self, step: int, round_: int, wanted: int, under_way: Collection[str] = ()) -> list[Prompt]:
        """Returns `wanted` prompts with `tokens` set. `under_way`: ids of the prompts of the step's earlier
        rounds and of steps ahead. Where prompts are chosen they are left out, if there are enough other candidates."""
        if self._config.kind == "uniform":
            return self.stream.next(wanted)
        each, size = self._config.candidates, self.stream.size
        drawn = self.stream.candidates(max(wanted, size if each is None else min(wanted * each, size)))
        distinct = {prompt.prompt_id: prompt for prompt in drawn}
        others = {prompt_id: prompt for prompt_id, prompt in distinct.items() if prompt_id not in under_way}
        # The first of these that has enough: a batch may need more prompts than there are.
        candidates = next(list(some) for some in (others.values(), distinct.values(), drawn) if len(some) >= wanted)
        rng = np.random.default_rng(derived_seed(self._seed, "prompt selection", str(step), str(round_)))
        taken = self.choose([prompt.prompt_id for prompt in candidates], wanted, rng)
        return [self.stream.encoded(candidates[index]) for index in taken]

    def choose(self, prompt_ids: list[str], wanted: int, rng: np.random.Generator) -> np.ndarray:
        """Draws `wanted` of the candidates `prompt_ids`: their indices, int64, ascending."""
        rate = success_rate(self._history.of(prompt_ids), self._history.pool())
        weight = np.sqrt(rate * (1 - rate)) + self._config.exploration
        return np.sort(rng.choice(len(prompt_ids), wanted, replace=False, p=weight / weight.sum()))

    def metrics(self) -> dict[str, float]:
        """`data/epoch` and `data/skipped_prompts` (too long) of the stream."""
        return {"data/epoch": self.stream.epoch, "data/skipped_prompts": self.stream.skipped}
