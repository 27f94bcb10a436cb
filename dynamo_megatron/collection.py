"""A step up to its updates: the next prompts, the rollouts that each gets, which of them are trained, and what they
teach the allocator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from dynamo_megatron.algorithm.allocation import Allocation, RolloutAllocator
from dynamo_megatron.algorithm.dynamic_sampling import informative
from dynamo_megatron.algorithm.rejection import rejections
from dynamo_megatron.config import Config
from dynamo_megatron.coordination import Coordinator
from dynamo_megatron.data.stream import PromptStream
from dynamo_megatron.policy.batch import TrainBatch, cut_mini_batches
from dynamo_megatron.policy.policy import Policy, ResponseStats
from dynamo_megatron.records import RolloutBatch
from dynamo_megatron.rollout.recorded import RecordedRollouts
from dynamo_megatron.rollout.result import RolloutError, RolloutResult
from dynamo_megatron.rollout.worker import RolloutWorker
from dynamo_megatron.serving import Serving
from dynamo_megatron.tracking.journal import Journal
from dynamo_megatron.tracking.step_metrics import Clock


@dataclass(frozen=True)
class Collected:
    """What a step sampled, in one round or, under dynamic sampling, in several."""

    allocations: list[Allocation]  # one a round
    result: RolloutResult  # of all rounds, without what was rejected
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


@dataclass(frozen=True)
class Chosen:
    """What rank 0 makes of a step's rounds: the rollouts to train on, and what the loss needs of each."""

    members: np.ndarray  # int64 [S], ascending, of all that the rounds gave
    advantages: np.ndarray
    mini_batch: np.ndarray
    weights: np.ndarray


class Collector:
    """Rank 0's. A round is `draw`, `sample` and `judge`; a step is one round, or under dynamic sampling several."""

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
        self.collected: Collected | None = None  # of the last step that is complete

    def begin(self, step: int) -> None:
        self._step, self._missing, self._drawn = step, self._config.data.batch_prompts, 0
        self._allocations: list[Allocation] = []
        self._results: list[RolloutResult] = []  # by round, without what is rejected
        self._kept: list[np.ndarray] = []  # by round: which of all that was sampled in the step is in the result
        self._sampled = 0

    def draw(self, on_poll: Callable[[], None]) -> None:
        """The next prompts, as many as groups are missing, and how many rollouts each gets. `on_poll` is called while
        the user's iterator gives none; what it raises ends the wait."""
        config, prompts = self._config, self._missing
        self._journal.progress.phase("reading data")
        self._prompts, self._first = self._stream.next(prompts, on_poll), self._drawn
        budget = config.rollout_budget * prompts // config.data.batch_prompts
        self._counts = self._allocator.allocate([p.prompt_id for p in self._prompts], budget, step=self._step)
        self._allocations.append(self._allocator.last)
        self._drawn += prompts

    def sample(self, on_poll: Callable[[], None]) -> RolloutBatch:
        """Rollouts of the prompts drawn, perhaps none. `on_poll` is called while servers generate; what it raises ends
        the wait. Raises PushNeeded: then it may be called again."""
        on_poll()
        progress = self._journal.progress
        progress.phase("generate", int(self._counts.sum()))
        arguments = (self._step, self._prompts, self._counts, on_poll, progress.count, self._first)
        self._results.append(self._rollout.generate(*arguments))
        progress.phase("logprobs")
        return self._results[-1].batch

    def judge(self, logprobs: np.ndarray, on_poll: Callable[[], None]) -> Chosen | None:
        """Rejects what cannot have been sampled from the present policy, whose `logprobs` (float [R]) of the round's
        responses are given; the allocator learns from the rest. None: another round is needed.

        With `algorithm.dynamic_sampling` (DAPO, arXiv 2503.14476) groups of equal rewards are left out of the batch
        and replaced by those of further prompts, for at most so many rounds; a batch of nothing else stays as it is.
        Raises RolloutError where not one rollout can be trained on, or more than `rollout.proof.max_rejected_share` of
        the step's are rejected, and not all of them are of one of several servers, which is restarted.
        """
        self._reject(logprobs, on_poll)
        fresh = self._results[-1].batch
        self._allocator.observe(fresh.prompt_ids, fresh.rewards, fresh.successes, self._step)
        sampled, sampling = RolloutResult.join(self._results), self._config.algorithm.dynamic_sampling
        teaches = informative(sampled.batch.rewards, sampled.batch.group_ids)
        teaching = {g for g, t in zip(sampled.batch.group_ids, teaches, strict=True) if t}
        self._missing = self._config.data.batch_prompts - len(teaching)
        last = self._results[-1].counts
        in_time = last["aborted"] < last["requested"]  # a round past the step's deadline gets nothing
        if self._missing and sampling and len(self._results) <= sampling.rounds and in_time:
            return None
        for note in sampled.notes:
            self._journal.say(note)
        if not sampled.batch.rollout_ids:
            why = [note.removeprefix(f"step {self._step}: ") for note in sampled.notes[-1:]]
            requested = sampled.counts["requested"]
            raise RolloutError("; ".join([f"step {self._step}: none of {requested} rollouts can be trained on", *why]))
        sampled.check_accounts(int(sum(a.counts.sum() for a in self._allocations)))
        self.collected = Collected(self._allocations, sampled, self._stream.epoch, self._stream.skipped)
        trained = np.flatnonzero(teaches) if sampling and teaches.any() else np.arange(len(teaches))
        batch = TrainBatch.build(sampled.batch.take(trained), self._config)
        return Chosen(np.concatenate(self._kept)[trained], batch.advantages, batch.mini_batch, batch.weights)

    def _reject(self, logprobs: np.ndarray, on_poll: Callable[[], None]) -> None:
        """Takes the round's rejected rollouts out of its result, and out of what the record says can be trained on."""
        step, proof, batch = self._step, self._config.rollout.proof, self._results[-1].batch
        found = rejections(
            logprobs,
            batch.engine_logprobs,
            batch.response_lengths,
            batch.weight_versions,
            step - 1,
            proof.max_mean_gap,
        )
        kept = np.setdiff1d(np.arange(len(batch.rollout_ids)), list(found))
        self._kept.append(self._sampled + kept)
        self._sampled += len(batch.rollout_ids)
        if not found:
            return
        blamed = Counter(batch.servers[i] for i in found)
        servers = ", ".join(f"{n} of {name}" for name, n in blamed.items() if name)
        one_of_several = len(blamed) == 1 and len(set(batch.servers)) > 1
        first, why = next(iter(found.items()))
        share = 1 - sum(map(len, self._kept)) / self._sampled
        note = (
            f"step {step}: {len(found)} of {len(batch.rollout_ids)} rollouts rejected{servers and f' ({servers})'}; "
            f"the first, {batch.rollout_ids[first]}: {why}"
        )
        self._rollout.reject(step, [batch.rollout_ids[i] for i in found], on_poll)
        if share > proof.max_rejected_share and not one_of_several:
            raise RolloutError(
                f"{note}. That is more than rollout.proof.max_rejected_share ({proof.max_rejected_share:g}) of the "
                "step: what sampled them is not the policy (docs/proof.md)"
            )
        self._results[-1] = self._results[-1].without(list(found), [note])


def collect(
    step: int, policy: Policy, coordinator: Coordinator, serving: Serving, collector: Collector | None, clock: Clock
) -> tuple[TrainBatch, ResponseStats]:
    """The batch of `step` and the policy's statistics of it, on every rank; `collector` on rank 0, None elsewhere.

    The statistics are those of the batch's own micro-batches: computed anew where the batch is not all of one round.
    Raises as `Collector` does, and StopRequested.
    """
    layout, mini_batches = policy.layout, policy.config.algorithm.loss.mini_batches
    what = f"the rollouts of step {step}"
    rounds: list[RolloutBatch] = []
    chosen: Chosen | None = None
    if collector is not None:
        collector.begin(step)
    while chosen is None:
        number = len(rounds)
        draw = partial(Collector.draw, collector, coordinator.check_stop)
        coordinator.from_rank_0(f"prompts-{step}-{number}", f"the prompts of step {step}", draw, layout)

        def sample() -> RolloutBatch:
            with clock("generate"):  # without the pushes that `ask` makes to restarted servers
                return collector.sample(coordinator.check_stop)

        rounds.append(serving.ask(f"rollouts-{step}-{number}", what, sample, version=step - 1))
        with clock("logprobs"):
            serving.memory("weights")
            stats = policy.token_stats(rounds[-1], cut_mini_batches(rounds[-1].group_ids, mini_batches))
            judge = partial(Collector.judge, collector, stats.logprobs.numpy(), coordinator.check)
            chosen = coordinator.from_rank_0(f"batch-{step}-{number}", what, judge, layout)
    serving.memory("train")
    sampled = rounds[0] if len(rounds) == 1 else RolloutBatch.join(rounds)
    whole = len(chosen.members) == len(sampled.rollout_ids)
    batch = TrainBatch(
        sampled if whole else sampled.take(chosen.members), chosen.advantages, chosen.mini_batch, chosen.weights
    )
    if len(rounds) > 1 or not whole:
        with clock("logprobs"):
            stats = policy.token_stats(batch.rollouts, batch.mini_batches)
    return batch, stats
