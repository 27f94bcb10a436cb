"""Rank 0's share of a step: the next prompts, the rollouts that each gets, and what they teach the allocator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dynamo_megatron.algorithm.allocation import Allocation, RolloutAllocator
from dynamo_megatron.algorithm.dynamic_sampling import informative
from dynamo_megatron.config import Config
from dynamo_megatron.data.stream import PromptStream
from dynamo_megatron.policy.batch import TrainBatch
from dynamo_megatron.records import Prompt
from dynamo_megatron.rollout.recorded import RecordedRollouts
from dynamo_megatron.rollout.result import RolloutError, RolloutResult
from dynamo_megatron.rollout.worker import RolloutWorker
from dynamo_megatron.tracking.journal import Journal


@dataclass(frozen=True)
class Collected:
    """What a step sampled, in one round or, under dynamic sampling, in several."""

    allocations: list[Allocation]  # one a round
    result: RolloutResult  # of all rounds
    epoch: int
    skipped_prompts: int

    @property
    def counts(self) -> np.ndarray:
        """int64 [prompts drawn], the rollouts of each."""
        return np.concatenate([a.counts for a in self.allocations])

    @property
    def history_share(self) -> float:
        return float(np.concatenate([a.history for a in self.allocations]).mean())

    def allocation_rows(self) -> Iterator[dict[str, Any]]:
        """The lines of allocation.jsonl; those of a later round say which."""
        for number, allocation in enumerate(self.allocations):
            for row in allocation.rows():
                yield {**row, "round": number} if number else row


class Collector:
    def __init__(
        self,
        config: Config,
        stream: PromptStream,
        allocator: RolloutAllocator,
        rollout: RolloutWorker | RecordedRollouts,
        journal: Journal,
    ):
        self._config, self._stream, self._allocator = config, stream, allocator
        self._rollout, self._journal = rollout, journal
        self._drawn: list[tuple[list[Prompt], Allocation]] = []  # rounds of the step under way
        self._results: list[RolloutResult] = []  # of those that are over

    def collect(self, step: int, on_poll: Callable[[], None]) -> tuple[TrainBatch, Collected]:
        """The batch of `step`. `on_poll` is called while the server generates; what it raises ends the wait.

        With `algorithm.dynamic_sampling` (DAPO, arXiv 2503.14476) groups of equal rewards are left out of the batch
        and replaced by those of further prompts, for at most so many rounds; a batch of nothing else stays as it is.
        Raises RolloutError where not one rollout can be trained on, and PushNeeded: a later call for the same step
        goes on where this one was.
        """
        on_poll()
        config, prompts = self._config, self._config.data.batch_prompts
        sampling = config.algorithm.dynamic_sampling
        missing, drawn = prompts, 0
        for number in range(1 + (sampling.rounds if sampling else 0)):
            if number == len(self._results):
                budget = config.rollout_budget * missing // prompts
                self._results.append(self._round(step, number, missing, budget, drawn, on_poll))
            drawn += missing
            sampled = RolloutResult.join(self._results[: number + 1])
            teaches = informative(sampled.batch.rewards, sampled.batch.group_ids)
            missing = prompts - len({g for g, t in zip(sampled.batch.group_ids, teaches, strict=True) if t})
            if not missing:
                break
        for note in sampled.notes:
            self._journal.say(note)
        if not sampled.batch.rollout_ids:
            why = [note.removeprefix(f"step {step}: ") for note in sampled.notes[-1:]]
            requested = sampled.counts["requested"]
            raise RolloutError("; ".join([f"step {step}: none of {requested} rollouts can be trained on", *why]))
        allocations = [allocation for _, allocation in self._drawn]
        sampled.check_accounts(int(sum(a.counts.sum() for a in allocations)))
        self._drawn, self._results = [], []
        trained = sampled.batch.take(np.flatnonzero(teaches)) if sampling and teaches.any() else sampled.batch
        collected = Collected(allocations, sampled, self._stream.epoch, self._stream.skipped)
        return TrainBatch.build(trained, config), collected

    def _round(
        self, step: int, number: int, prompts: int, budget: int, first: int, on_poll: Callable[[], None]
    ) -> RolloutResult:
        """`prompts` more prompts, the first at position `first` of the step; the allocator learns from them at once."""
        if number == len(self._drawn):
            batch = self._stream.next(prompts)
            self._allocator.allocate([p.prompt_id for p in batch], budget, step=step)
            self._drawn.append((batch, self._allocator.last))
        batch, allocation = self._drawn[number]
        counts = allocation.counts
        self._journal.progress.phase("generate", int(counts.sum()))
        result = self._rollout.generate(step, batch, counts, on_poll, self._journal.progress.count, first)
        rollouts = result.batch
        self._allocator.observe(rollouts.prompt_ids, rollouts.rewards, rollouts.successes, step)
        return result
