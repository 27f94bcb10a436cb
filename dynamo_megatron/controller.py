"""Rank 0's part of a training step: prompts, the rollouts that each gets, which of them are trained on, the record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dynamo_megatron.algorithm.allocation import Allocation, RolloutAllocator
from dynamo_megatron.algorithm.dynamic_sampling import informative
from dynamo_megatron.algorithm.premises import premise_warnings
from dynamo_megatron.algorithm.rejection import rejections
from dynamo_megatron.config import Config
from dynamo_megatron.data.stream import PromptStream
from dynamo_megatron.evaluation.periodic import PeriodicEvaluation
from dynamo_megatron.rollout.recorded import RecordedRollouts
from dynamo_megatron.rollout.result import RolloutError, RolloutResult
from dynamo_megatron.rollout.worker import RolloutWorker
from dynamo_megatron.runtime.coordination import Coordinator
from dynamo_megatron.tracking.journal import Journal
from dynamo_megatron.tracking.step_line import legend, step_line
from dynamo_megatron.tracking.step_metrics import StepRecord, step_metrics
from dynamo_megatron.types import Prompt, RolloutBatch

if TYPE_CHECKING:  # the rollout process and tests go without Megatron
    from dynamo_megatron.phases import Clock
    from dynamo_megatron.policy.batch import TrainBatch
    from dynamo_megatron.policy.policy import ResponseStats
    from dynamo_megatron.weight_sync.push import PushReport


class Verdict(NamedTuple):
    """After a step: whether it is to be evaluated, whether it is the best one evaluated so far, and why the run ends
    here (None: it does not)."""

    evaluate: bool
    best: bool
    finished: str | None


@dataclass
class Round:
    """Some of a step's prompts and their rollouts. A step is one round, or under dynamic sampling several."""

    prompts: list[Prompt]
    first: int  # position of the first prompt in the step
    allocation: Allocation | None = None
    result: RolloutResult | None = None  # after `reject` without the rejected rollouts
    sampled: int = 0  # trainable rollouts, before `reject`
    kept: np.ndarray | None = None  # int64, ascending: which of them are in `result`


class Controller:
    """One method for each thing that rank 0 does in a step, in the order of the loop (train.py).

    Between a step's first `draw` and its `log` it holds the step's rounds; across steps only the stream, the allocator
    and the journal remember anything. Methods that wait raise StopRequested where the run is asked to stop.
    """

    def __init__(
        self,
        config: Config,
        stream: PromptStream,
        allocator: RolloutAllocator,
        rollout: RolloutWorker | RecordedRollouts,
        evaluation: PeriodicEvaluation | None,
        journal: Journal,
        coordinator: Coordinator,
    ):
        self.config, self._stream, self._allocator = config, stream, allocator
        self._rollout, self._evaluation = rollout, evaluation
        self._journal, self._coordinator = journal, coordinator
        self._step, self._rounds = 0, []
        self.record: StepRecord | None = None

    def explain(self) -> None:
        """Prints what the user should know of the method, and the legend of the step's line."""
        allocation = self.config.algorithm.allocation
        if allocation.kind == "neyman":
            alike = "in the pool, so that a first pass is uniform"
            if allocation.prior_by is not None:
                alike = f"of its {allocation.prior_by}"
            self._journal.say(f"allocation: a prompt without history gets what the average prompt gets {alike}")
        for warning in premise_warnings(self.config):
            self._journal.say(f"warning: {warning}")
        self._journal.say(legend(self.config.trainer.steps, self._journal.width))

    # -- the verbs of a step ---------------------------------------------------------------------------------------
    def draw(self, step: int) -> list[Prompt]:
        """The next prompts of the data: a batch, or in a later round as many as the batch still misses groups."""
        if step != self._step:
            self._step, self._rounds, self._missing = step, [], self.config.data.batch_prompts
            self.record = None
        self._journal.progress.phase("reading data")
        prompts = self._stream.next(self._missing, self._coordinator.check_stop)
        self._rounds.append(Round(prompts, sum(len(r.prompts) for r in self._rounds)))
        return prompts

    def allocate(self, prompts: Sequence[Prompt]) -> None:
        """Divides the rollout budget among `prompts`, by what `observe` has seen of them in earlier steps."""
        budget = self.config.rollout_budget * len(prompts) // self.config.data.batch_prompts
        ids = [prompt.prompt_id for prompt in prompts]
        self._rounds[-1].allocation = self._allocator.decide(ids, budget, step=self._step)

    def generate(self) -> RolloutBatch:
        """Scored rollouts of the prompts drawn last, on disk by then, perhaps none. Raises PushNeeded: then it may be
        called again."""
        now, progress = self._rounds[-1], self._journal.progress
        counts = now.allocation.counts
        self._coordinator.check_stop()
        progress.phase("generate", int(counts.sum()))
        now.result = self._rollout.generate(
            self._step, now.prompts, counts, self._coordinator.check_stop, progress.count, now.first
        )
        return now.result.batch

    def reject(self, logprobs: np.ndarray) -> None:
        """Takes rollouts out of the round that cannot have been sampled from the present policy, whose `logprobs`
        (float [R]) of the round's response tokens are given. Raises RolloutError where more than
        `rollout.proof.max_rejected_share` of the step's are rejected, and not all of them are of one of several
        servers, which is restarted."""
        step, proof, now = self._step, self.config.rollout.proof, self._rounds[-1]
        batch = now.result.batch
        found = rejections(
            logprobs,
            batch.engine_logprobs,
            batch.response_lengths,
            batch.weight_versions,
            step - 1,
            proof.max_mean_gap,
        )
        now.sampled = len(batch.rollout_ids)
        now.kept = np.setdiff1d(np.arange(now.sampled), list(found)).astype(np.int64)
        if not found:
            return
        blamed = Counter(batch.servers[i] for i in found)
        servers = ", ".join(f"{n} of {name}" for name, n in blamed.items() if name)
        one_of_several = len(blamed) == 1 and len(set(batch.servers)) > 1
        first, why = next(iter(found.items()))
        note = (
            f"step {step}: {len(found)} of {now.sampled} rollouts rejected{servers and f' ({servers})'}; "
            f"the first, {batch.rollout_ids[first]}: {why}"
        )
        self._rollout.reject(step, [batch.rollout_ids[i] for i in found], self._coordinator.check)
        share = 1 - sum(len(r.kept) for r in self._rounds) / sum(r.sampled for r in self._rounds)
        if share > proof.max_rejected_share and not one_of_several:
            raise RolloutError(
                f"{note}. That is more than rollout.proof.max_rejected_share ({proof.max_rejected_share:g}) of the "
                "step: what sampled them is not the policy (docs/proof.md)"
            )
        now.result = now.result.without(list(found), [note])

    def observe(self) -> None:
        """The allocator's history of each prompt takes in the rewards of the round's rollouts."""
        fresh = self._rounds[-1].result.batch
        self._allocator.observe(fresh.prompt_ids, fresh.rewards, fresh.successes, self._step)

    def select(self) -> np.ndarray | None:
        """Which of the step's rollouts are trained on: int64, ascending, of all that its rounds sampled. None: another
        round is needed.

        With `algorithm.dynamic_sampling` (DAPO, arXiv 2503.14476) groups of equal rewards are left out and replaced by
        those of further prompts, for at most so many rounds; a batch of nothing else stays as it is. Raises
        RolloutError where not one rollout can be trained on.
        """
        step, sampling = self._step, self.config.algorithm.dynamic_sampling
        sampled = RolloutResult.join([r.result for r in self._rounds])
        differs = informative(sampled.batch.rewards, sampled.batch.group_ids)
        groups = {sampled.batch.group_ids[s] for s in np.flatnonzero(differs)}
        self._missing = self.config.data.batch_prompts - len(groups)
        last = self._rounds[-1].result.counts
        in_time = last["aborted"] < last["requested"]  # a round past the step's deadline gets nothing
        if self._missing and sampling and len(self._rounds) <= sampling.rounds and in_time:
            return None
        for note in sampled.notes:
            self._journal.say(note)
        if not sampled.batch.rollout_ids:
            why = [note.removeprefix(f"step {step}: ") for note in sampled.notes[-1:]]
            requested = sampled.counts["requested"]
            raise RolloutError("; ".join([f"step {step}: none of {requested} rollouts can be trained on", *why]))
        allocations = [r.allocation for r in self._rounds]
        sampled.check_accounts(int(sum(a.counts.sum() for a in allocations)))
        self.record = StepRecord(step, allocations, sampled, self._stream.epoch, self._stream.skipped)
        starts = np.cumsum([0, *(r.sampled for r in self._rounds)])
        kept = np.concatenate([start + r.kept for start, r in zip(starts, self._rounds, strict=False)])
        return kept[differs] if sampling and differs.any() else kept

    # -- after the update ------------------------------------------------------------------------------------------
    def log(
        self,
        batch: TrainBatch,
        stats: ResponseStats,
        updates: Sequence[Mapping[str, float]],
        pushed: PushReport,
        clock: Clock,
        ranks: Mapping[str, float],
    ) -> None:
        """Writes the step's metrics and allocation, and its line for the user. `ranks`: metrics of all ranks."""
        metrics = step_metrics(self.record, batch, stats, updates, pushed, clock, self.config) | ranks
        line = step_line(metrics, self.config.trainer.steps, self._journal.width)
        self._journal.step(metrics, line, self.record.allocation_rows())

    def verdict(self, step: int) -> Verdict:
        """Also of an evaluation from before a kill, which may have come between it and its export."""
        evaluation, journal = self._evaluation, self._journal
        due = evaluation is not None and (journal.finished() is not None or evaluation.due(step))
        evaluated = due and journal.evaluated(step)
        return Verdict(due and not evaluated, evaluated and journal.best(step), journal.finished())

    def evaluate(self, step: int) -> Verdict:
        """Evaluates the servers' weights, those of `step`. Raises PushNeeded: then it may be called again."""
        evaluation, journal = self._evaluation, self._journal
        journal.progress.phase("evaluate", evaluation.responses)
        journal.evaluation(evaluation.run(step, self._coordinator.check_stop, journal.progress.count, journal.say))
        return self.verdict(step)
