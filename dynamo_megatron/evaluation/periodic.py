"""Evaluation during training: other problems, the same server, and nothing of the training touched.

Prompt order, allocator and random state belong to the training; an evaluation only asks the server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from dynamo_megatron.config import Config
from dynamo_megatron.evaluation.results import ProblemResult, results_file, summarise, write_results
from dynamo_megatron.records import Prompt


class AnswersProblems(Protocol):
    def evaluate(
        self, prompts: Sequence[Prompt], on_poll: Callable[[], None], on_count: Callable[[int, int], None]
    ) -> list[ProblemResult]: ...


class PeriodicEvaluation:
    """Rank 0's. `prompts` are tokenized."""

    def __init__(self, config: Config, prompts: Sequence[Prompt], rollout: AnswersProblems):
        self._config, self._prompts, self._rollout = config, prompts, rollout
        self.responses = len(prompts) * config.eval.samples

    def due(self, step: int) -> bool:
        """Before the first step, every `eval.every` steps, and after the last."""
        return step % self._config.eval.every == 0 or step == self._config.trainer.steps

    def run(self, step: int, on_poll: Callable[[], None], on_count: Callable[[int, int], None]) -> dict[str, float]:
        """Evaluates the weights that the server has, those of `step`; writes eval/step-NNNNNN.jsonl."""
        start = time.monotonic()
        results = self._rollout.evaluate(self._prompts, on_poll, on_count)
        write_results(results_file(Path(self._config.output_dir), step), results)
        return {"step": step, **summarise(results, self._config.eval.k), "eval/seconds": time.monotonic() - start}
