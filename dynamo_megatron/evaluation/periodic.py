"""Evaluation during training: held-out problems, answered by the same servers.

An evaluation only sends requests to the servers. It does not change the prompt order, the allocator or the random state
of training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from dynamo_megatron.config import Config
from dynamo_megatron.evaluation.cache import cache_file, read_cached, write_cached
from dynamo_megatron.evaluation.results import results_file, summarise, write_results
from dynamo_megatron.types import ProblemResult, Prompt


class AnswersProblems(Protocol):
    def begin_evaluation(self, prompts: Sequence[Prompt], on_poll: Callable[[], None]) -> None: ...

    def end_evaluation(self, on_poll: Callable[[], None]) -> list[ProblemResult]: ...

    def evaluate(
        self, prompts: Sequence[Prompt], on_poll: Callable[[], None], on_count: Callable[[int, int], None]
    ) -> list[ProblemResult]: ...

    def rescore(
        self, prompts: Sequence[Prompt], results: Sequence[ProblemResult], on_poll: Callable[[], None]
    ) -> list[ProblemResult]: ...


class PeriodicEvaluation:
    """Evaluates the policy during training, on rank 0. `prompts` are tokenized. `under_way`: the step whose evaluation
    `begin` has started, and when (monotonic seconds)."""

    def __init__(self, config: Config, prompts: Sequence[Prompt], rollout: AnswersProblems):
        self._config, self._prompts, self._rollout = config, prompts, rollout
        self.responses = len(prompts) * config.eval.samples
        self.under_way: tuple[int, float] | None = None

    def due(self, step: int) -> bool:
        """Returns True before the first step (`step` 0), every `eval.every` steps, and after the last step."""
        return step % self._config.eval.every == 0 or step == self._config.trainer.steps

    def begin(self, step: int, on_poll: Callable[[], None]) -> None:
        """Starts the evaluation on the servers, which have the weights of `step`. The next push waits for its end."""
        self.under_way = step, time.monotonic()
        self._rollout.begin_evaluation(self._prompts, on_poll)

    def end(self, on_poll: Callable[[], None]) -> dict[str, float]:
        """As `run`, for the evaluation that `begin` started. Raises PushNeeded where it was lost with its servers."""
        (step, start), self.under_way = self.under_way, None
        return self._summary(step, start, self._rollout.end_evaluation(on_poll))

    def run(
        self,
        step: int,
        on_poll: Callable[[], None],
        on_count: Callable[[int, int], None],
        say: Callable[[str], None],
    ) -> dict[str, float]:
        """Evaluates the servers' weights, which are those of `step`; writes eval/step-NNNNNN.jsonl and returns the
        metrics. With `eval.cache` the responses of step 0, which are those of `model.path`, are kept for other runs, or
        taken from another run. External servers and agents are excluded, since their engine or code is not known."""
        start, rollout = time.monotonic(), self._config.rollout
        kept = step == 0 and self._config.eval.cache and rollout.placement != "external" and rollout.agent is None

        def sample() -> list[ProblemResult]:
            return self._rollout.evaluate(self._prompts, on_poll, on_count)

        return self._summary(step, start, self._first(sample, on_poll, say) if kept else sample())

    def _summary(self, step: int, start: float, results: list[ProblemResult]) -> dict[str, float]:
        write_results(results_file(Path(self._config.output_dir), step), results)
        return {"step": step, **summarise(results, self._config.eval.k), "eval/seconds": time.monotonic() - start}

    def _first(
        self, sample: Callable[[], list[ProblemResult]], on_poll: Callable[[], None], say: Callable[[str], None]
    ) -> list[ProblemResult]:
        try:
            file = cache_file(self._config, self._prompts, on_poll)
        except ValueError as error:
            say(f"warning: the evaluation of the start is not kept for other runs: {error}")
            return sample()
        try:
            kept = read_cached(file, self._prompts, self._config.eval.samples)
        except (ValueError, OSError) as error:
            say(f"warning: a kept evaluation is not used: {error}")
            kept = None
        if kept is not None:
            say(f"evaluation of the start: responses taken from {file} (eval.cache: false samples new ones)")
            return self._rollout.rescore(self._prompts, kept, on_poll)
        results = sample()
        try:
            write_cached(file, results)
        except OSError as error:
            say(f"warning: the evaluation of the start is not kept for other runs: {error}")
        return results
