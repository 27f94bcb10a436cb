"""Evaluation during training: held-out problems, answered by the same servers.

An evaluation only sends requests to the servers. It does not change the prompt order, the allocator or the random state
of training.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_megatron.config import Config
from dynamo_megatron.errors import InputError
from dynamo_megatron.evaluation.results import read_results, results_file, summarise, write_results
from dynamo_megatron.runtime.late import torch
from dynamo_megatron.types import ProblemResult, Prompt

if TYPE_CHECKING:
    from dynamo_megatron.rollout.worker import RolloutWorker


class PeriodicEvaluation:
    """Evaluates the policy during training, on rank 0. `prompts` are tokenized. `under_way`: the step whose evaluation
    `begin` has started, and when (monotonic seconds)."""

    def __init__(self, config: Config, prompts: Sequence[Prompt], rollout: RolloutWorker):
        self._config, self._prompts, self._rollout = config, prompts, rollout
        self.responses = len(prompts) * config.eval.samples
        self.under_way: tuple[int, float] | None = None

    def due(self, step: int) -> bool:
        """Returns True before the first step (`step` 0), every `eval.every` steps, and after the last step."""
        return step % self._config.eval.every == 0 or step == self._config.trainer.steps

    def begin(self, step: int, on_poll: Callable[[], None]) -> None:
        """Starts the evaluation on the servers, which have the weights of `step`. The next sync waits for its end."""
        self.under_way = step, time.monotonic()
        self._rollout.begin_evaluation(self._prompts, on_poll)

    def end(self, on_poll: Callable[[], None]) -> dict[str, float]:
        """As `run`, for the evaluation that `begin` started. Raises SyncNeeded where it was lost with its servers."""
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
        """Responses are kept, not scores: reward functions may change without a change of name. Nothing is kept where a
        response failed: the next run asks again."""
        file, samples = cache_file(self._config, self._prompts), self._config.eval.samples
        try:
            if file.is_file():
                kept = read_results(file)
                if [(r.prompt_id, len(r.responses)) for r in kept] != [(p.prompt_id, samples) for p in self._prompts]:
                    raise InputError(f"{file}: does not have {samples} responses to each of the problems")
                say(f"evaluation of the start: responses taken from {file} (eval.cache: false samples new ones)")
                return self._rollout.rescore(self._prompts, kept, on_poll)
        except (ValueError, OSError) as error:
            say(f"warning: a kept evaluation is not used: {error}")
        results = sample()
        if all(reason in ("stop", "length") for result in results for reason in result.finish_reasons):
            try:
                file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_results(file, results, shared=True)
            except OSError as error:
                say(f"warning: the evaluation of the start is not kept for other runs: {error}")
        return results


def cache_folder() -> Path:
    """DYNAMO_MEGATRON_CACHE, else dynamo-megatron in the user's cache folder."""
    if own := os.environ.get("DYNAMO_MEGATRON_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dynamo-megatron"


def cache_file(config: Config, prompts: Sequence[Prompt]) -> Path:
    """Where the responses of `model.path` to `prompts` (tokenized) are kept: named by all that they depend on. A file
    of the model is known by its path, size and time of change."""
    evaluation, rollout, folder = config.eval, config.rollout, Path(config.model.path).resolve()
    files = [(str(path), path.stat()) for path in sorted(folder.rglob("*")) if path.is_file()]
    identity = {
        "model": [(path, status.st_size, status.st_mtime_ns) for path, status in files],
        "settings": config.model.model_dump(exclude={"path"}),
        "problems": [(prompt.prompt_id, prompt.tokens) for prompt in prompts],
        "sampling": [evaluation.samples, evaluation.temperature, evaluation.max_new_tokens, config.seed],
        "rollout": [rollout.temperature, rollout.max_new_tokens, rollout.stop, rollout.quantization],
        "engine": [rollout.python, rollout.tp, rollout.server_args, config.trainer.deterministic],
        "versions": [own.version for own in metadata.distributions(name="sglang")],
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    return cache_folder() / f"{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]}.jsonl"
