"""Evaluation during training: held-out problems, answered by the same servers.

An evaluation only sends requests to the servers. It does not change the prompt order, the allocator or the random state
of training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_megatron.config import Config
from dynamo_megatron.evaluation.results import results_file, summarise, write_results
from dynamo_megatron.types import ProblemResult, Prompt

if TYPE_CHECKING:
    from dynamo_megatron.rollout.worker import RolloutWorker


class PeriodicEvaluation:
    """Evaluates the policy during training, on rank 0. `prompts` are tokenized. `under_way`: the step whose evaluation
    `begin` has started."""

    def __init__(self, config: Config, prompts: Sequence[Prompt], rollout: RolloutWorker):
        self._config, self._prompts, self._rollout = config, prompts, rollout
        self.responses = len(prompts) * config.eval.samples
        self.under_way: int | None = None

    def due(self, step: int) -> bool:
        """Returns True before the first step (`step` 0), every `eval.every` steps, and after the last step."""
        return step % self._config.eval.every == 0 or step == self._config.trainer.steps

    def begin(self, step: int, on_poll: Callable[[], None]) -> None:
        """Starts the evaluation on the servers, which have the weights of `step`. The next sync waits for its end."""
        self.under_way = step
        self._rollout.begin_evaluation(self._prompts, on_poll)

    def end(self, on_poll: Callable[[], None]) -> dict[str, float]:
        """As `run`, for the evaluation that `begin` started, without its seconds. Raises SyncNeeded where it was lost
        with its servers."""
        step, self.under_way = self.under_way, None
        return self._summary(step, self._rollout.end_evaluation(on_poll))

    def run(self, step: int, on_poll: Callable[[], None], on_count: Callable[[int, int], None]) -> dict[str, float]:
        """Evaluates the servers' weights, which are those of `step`; writes eval/step-NNNNNN.jsonl and returns the
        metrics."""
        start = time.monotonic()
        summary = self._summary(step, self._rollout.evaluate(self._prompts, on_poll, on_count))
        return {**summary, "eval/seconds": time.monotonic() - start}

    def _summary(self, step: int, results: list[ProblemResult]) -> dict[str, float]:
        write_results(results_file(Path(self._config.output_dir), step), results)
        return {"step": step, **summarise(results, self._config.eval.k)}
