"""Evaluation during training: other problems, the same server, and nothing of the training touched.

Prompt order, allocator and random state belong to the training; an evaluation only asks the server.
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
    """Rank 0's. `prompts` are tokenized. `under_way`: the step that `begin` has begun to evaluate, and when (monotonic
    seconds)."""

    def __init__(self, config: Config, prompts: Sequence[Prompt], rollout: AnswersProblems):
        self._config, self._prompts, self._rollout = config, prompts, rollout
        self.responses = len(prompts) * config.eval.samples
        self.under_way: tuple[int, float] | None = None

    def due(self, step: int) -> bool:
        """Before the first step, every `eval.every` steps, and after the last."""
        return step % self._config.eval.every == 0 or step == self._config.trainer.steps

    def begin(self, step: int, on_poll: Callable[[], None]) -> None:
        """Has the servers, which have the weights of `step`, begin to answer. The next push waits for them."""
        self.under_way = step, time.monotonic()
        self._rollout.begin_evaluation(self._prompts, on_poll)

    def end(self, on_poll: Callable[[], None]) -> dict[str, float]:
        """As `run`, of what `begin` has begun. Raises PushNeeded where that was lost with its servers."""
        (step, start), self.under_way = self.under_way, None
        return self._summary(step, start, self._rollout.end_evaluation(on_poll))

    def run(
        self,
        step: int,
        on_poll: Callable[[], None],
        on_count: Callable[[int, int], None],
        say: Callable[[str], None],
    ) -> dict[str, float]:
        """Evaluates the weights that the server has, those of `step`; writes eval/step-NNNNNN.jsonl. With `eval.cache`
        the responses of step 0, those of `model.path`, are kept for other runs, or come from one; not those of
        somebody else's servers, whose engine is not known, nor those of an agent, which is not known either."""
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
