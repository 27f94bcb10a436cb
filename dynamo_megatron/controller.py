"""Rank 0's part of a training step: it draws prompts, has rollouts sampled, selects what is trained on, and logs."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dynamo_megatron.algorithm.allocation import RolloutAllocator
from dynamo_megatron.algorithm.energy import rollout_energies
from dynamo_megatron.algorithm.premises import premise_warnings
from dynamo_megatron.algorithm.rollout_correction import rejections
from dynamo_megatron.config import Config
from dynamo_megatron.data.selection import PromptSelection
from dynamo_megatron.evaluation.periodic import PeriodicEvaluation
from dynamo_megatron.rollout.recorded import RecordedRollouts
from dynamo_megatron.rollout.result import RolloutError, SyncNeeded
from dynamo_megatron.rollout.worker import RolloutWorker
from dynamo_megatron.rounds import Round, RoundRules, RoundsAhead, Selection
from dynamo_megatron.runtime.coordination import Coordinator
from dynamo_megatron.tracking.journal import Journal
from dynamo_megatron.tracking.progress import LEGEND, step_line
from dynamo_megatron.tracking.step_metrics import StepRecord
from dynamo_megatron.tracking.token_rows import token_rows
from dynamo_megatron.types import Prompt, RolloutBatch, TokenStats

if TYPE_CHECKING:
    from dynamo_megatron.policy.batch import TrainBatch


class StepEnd(NamedTuple):
    """What comes after a step."""

    evaluate: bool
    is_best: bool  # better than the step that output_dir/hf has


class Controller:
    """One method for each thing that rank 0 does in a step, in the order of the loop (train.py). State across steps is
    in the prompt selection, the allocator's history, the journal, and the rounds and the evaluation under way;
    state within a step is in its `Round`s.

    Methods that wait raise StopRequested if a stop of the run is requested.
    """

    def __init__(
        self,
        config: Config,
        prompts: PromptSelection,
        allocator: RolloutAllocator,
        rollout: RolloutWorker | RecordedRollouts,
        evaluation: PeriodicEvaluation | None,
        journal: Journal,
        coordinator: Coordinator,
    ):
        self.config, self._prompts, self._allocator = config, prompts, allocator
        self._rollout, self._evaluation = rollout, evaluation
        self.ahead, self._rules = RoundsAhead(), RoundRules(config)
        self._dispatched = 0  # the last step whose first round this process has dispatched
        self._journal, self._coordinator = journal, coordinator

    def begin(self, start: int) -> None:
        """To be called before the step after `start`. Prints what the user should know about the method, and the legend
        of the step lines."""
        if self.config.algorithm.allocation.kind == "neyman":
            self._journal.say(
                "allocation: a prompt without history gets what the average prompt gets: a first pass is uniform"
            )
        for warning in premise_warnings(self.config):
            self._journal.say(f"warning: {warning}")
        self._journal.say(LEGEND)
        self._journal.progress.start(start)

    # -- sampling --------------------------------------------------------------------------------------------------
    def begin_round(self, step: int, rounds: Sequence[Round]) -> Round:
        """Returns the round of `step` after `rounds`: prompts, and how many rollouts each gets. With
        `rollout.max_staleness` it also draws the first rounds of that number of later steps, from what is known now,
        and dispatches all rounds that it has drawn."""
        staleness, ahead = self.config.rollout.max_staleness, self.ahead.rounds
        if staleness == 0:
            return self.allocate(step, self.draw(step, rounds), rounds)
        for later in range(step, min(step + staleness, self.config.trainer.steps) + 1):
            if later not in ahead:
                ahead[later] = self.allocate(later, self.draw(later, []), [])
                ahead[later].version, ahead[later].drawing = step - 1, self._prompts.metrics()
            if later > self._dispatched:
                now = ahead[later]
                self._rollout.dispatch(later, now.prompts, now.allocation.counts, self._coordinator.check_stop)
                self._dispatched = later
        return ahead.pop(step)

    def draw(self, step: int, rounds: Sequence[Round]) -> list[Prompt]:
        """Draws prompts from the data, by default the next ones (`data.selection`): a batch, or after the step's first
        round one for each group that the batch still lacks. With `algorithm.sequential` it returns the prompts of the
        first round that get further rollouts."""
        self._journal.progress.phase("read data")
        if further := self._rules.next_round(rounds):
            return [rounds[0].prompts[i] for i in further.prompts]
        missing = self._rules.missing(rounds, self.config.data.batch_prompts)
        under_way = {prompt.prompt_id for now in (*self.ahead.rounds.values(), *rounds) for prompt in now.prompts}
        return self._prompts.draw(step, len(rounds), missing, under_way)

    def allocate(self, step: int, prompts: list[Prompt], rounds: Sequence[Round]) -> Round:
        """Decides how many rollouts each of `prompts` gets in the round after `rounds`. Divides their share of the
        step's budget according to the history that `observe` has collected. A prompt without history counts as the
        average prompt. Rounds of `algorithm.sequential` have budgets of their own, divided evenly."""
        advantage, ids = self.config.algorithm.advantage, [prompt.prompt_id for prompt in prompts]
        budget = self.config.rollout_budget * len(prompts) // self.config.data.batch_prompts
        first = sum(len(r.prompts) for r in rounds)
        origin = first + np.arange(len(prompts))
        if further := self._rules.next_round(rounds):
            budget, origin = further.budget, further.prompts
        elif sequential := self.config.algorithm.sequential:
            budget = sequential.round_n * len(prompts)
        allocation, baseline = self._allocator.decide(ids, budget, step=step), None
        if advantage.kind == "history":
            ratio = None if advantage.score_ratio == "auto" else advantage.score_ratio
            baseline = self._allocator.reward_baseline(ids, advantage.prior_strength, ratio)
        return Round(prompts, allocation, baseline, first, origin)

    def generate(self, step: int, now: Round) -> RolloutBatch:
        """Returns the scored rollouts of the round's prompts, possibly none; all are on disk. Raises SyncNeeded if no
        server is left that has the weights; after a weight sync it may be called again."""
        progress, counts = self._journal.progress, now.allocation.counts
        self._coordinator.check_stop()
        progress.phase("generate", int(counts.sum()))
        on_poll = self._coordinator.check_stop
        if now.version is None:
            self._rollout.dispatch(step, now.prompts, counts, on_poll, now.first)
        now.result = self._rollout.collect(step, on_poll, progress.count, now.first)
        now.sampled = len(now.result.batch.rollout_ids)
        now.kept = np.arange(now.sampled)
        for note in now.result.notes:
            self._journal.say(note)
        return now.result.batch

    def reject(self, step: int, rounds: Sequence[Round], logprobs: np.ndarray) -> None:
        """Removes rollouts from the last round if their weights were too old, or if the server's logprobs of their
        tokens differ too much from the policy's (`logprobs`, natural log, [R]). Raises RolloutError if more than
        `rollout.proof.max_rejected_share` of the step's rollouts are rejected, unless all rejected rollouts of the
        round come from one of several servers."""
        proof, now = self.config.rollout.proof, rounds[-1]
        batch = now.result.batch
        lengths, versions = batch.response_lengths, batch.weight_versions
        limits = proof.max_mean_gap, self.config.rollout.max_staleness
        if not (found := rejections(logprobs, batch.engine_logprobs, lengths, versions, step - 1, *limits)):
            return
        now.kept = np.setdiff1d(now.kept, list(found))
        blamed = Counter(batch.servers[i] for i in found)
        servers = ", ".join(f"{n} of {name}" for name, n in blamed.items() if name)
        one_of_several = len(blamed) == 1 and len(set(batch.servers)) > 1
        first, why = next(iter(found.items()))
        note = (
            f"step {step}: {len(found)} of {now.sampled} rollouts rejected{servers and f' ({servers})'}; "
            f"the first, {batch.rollout_ids[first]}: {why}"
        )
        self._rollout.reject(step, [batch.rollout_ids[i] for i in found], self._coordinator.check)
        share = 1 - sum(len(r.kept) for r in rounds) / sum(r.sampled for r in rounds)
        if share > proof.max_rejected_share and not one_of_several:
            raise RolloutError(
                f"{note}. That is more than rollout.proof.max_rejected_share ({proof.max_rejected_share:g}) of the "
                "step: what sampled them is not the policy (docs/rollouts.md)"
            )
        now.result = now.result.without(list(found), [note])
        self._journal.say(note)

    def observe(self, step: int, now: Round, sampled: RolloutBatch, stats: TokenStats) -> None:
        """Adds reward and energy of each rollout of the round to the allocator's history, except those that were
        rejected. `sampled`: the round's rollouts with the rejected ones; `stats`: of their tokens."""
        fresh, lengths = now.result.batch, sampled.response_lengths
        energies = rollout_energies(stats.logprobs.numpy(), stats.collision.numpy(), lengths)
        if self.config.algorithm.loss.aggregation == "sequence_mean":  # a token's gradient has the weight 1 / length
            energies = energies / np.maximum(lengths, 1) ** 2
        self._allocator.observe(fresh.prompt_ids, fresh.rewards, fresh.successes, step, energies[now.kept])

    def select(self, step: int, rounds: Sequence[Round]) -> Selection | None:
        """Selects the rollouts that are trained on from all that the step's rounds sampled. Returns None if another
        round is needed.

        With `algorithm.dynamic_sampling` (DAPO, arXiv 2503.14476) groups of equal rewards are left out and replaced by
        groups of other prompts, in at most `dynamic_sampling.rounds` further rounds. If all groups have equal rewards,
        all are trained on. With `algorithm.sequential` its rule selects (algorithm/sequential.py).
        Raises RolloutError if no rollout can be trained on.
        """
        if not self._rules.complete(rounds, self.config.data.batch_prompts):
            return None
        sampled = self._rules.joined(rounds)
        if not sampled.batch.rollout_ids:
            why = [note.removeprefix(f"step {step}: ") for note in sampled.notes[-1:]]
            requested = sampled.counts["requested"]
            raise RolloutError("; ".join([f"step {step}: none of {requested} rollouts can be trained on", *why]))
        sampled.check_accounts(int(sum(r.allocation.counts.sum() for r in rounds)))
        return self._rules.select(rounds, sampled.batch)

    # -- after the update ------------------------------------------------------------------------------------------
    def record(self, step: int, rounds: Sequence[Round]) -> StepRecord:
        """Returns the record of what the step sampled."""
        sampled = self._rules.joined(rounds)
        ratio = None if rounds[0].baseline is None else rounds[0].baseline.score_ratio
        allocations, drawing = [r.allocation for r in rounds], rounds[0].drawing or self._prompts.metrics()
        return StepRecord(step, allocations, [r.origin for r in rounds], sampled, drawing, ratio, rounds[0].version)

    def log(self, record: StepRecord, metrics: Mapping[str, float], batch: TrainBatch, stats: TokenStats) -> None:
        """Writes the step's metrics and allocation, its line for the user, and with `tracking.token_rollouts` the token
        statistics of some rollouts."""
        if count := self.config.tracking.token_rollouts:
            self._journal.tokens(record.step, token_rows(batch, stats, self.config, count))
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        self._journal.step(metrics, step_line(metrics, self.config.trainer.steps, width), record.allocation_rows())

    def end_of(self, step: int) -> StepEnd:
        """Decides what comes after `step`. An evaluation from before a kill counts, since the kill may have prevented
        its export. With `rollout.max_staleness` an evaluation may begin here, and end while the next step trains."""
        evaluation, journal = self._evaluation, self._journal
        lost = evaluation is not None and evaluation.under_way is not None and not self._end_evaluation()
        due = evaluation is not None and (lost or evaluation.due(step))
        evaluated = due and journal.evaluated(step)
        # The next step may train meanwhile, unless this is the first or last evaluation, or an export depends on it.
        between, needed = 0 < step < self.config.trainer.steps, self.config.checkpoint.export_hf == "best"
        if due and not evaluated and between and self.config.rollout.max_staleness > 0 and not needed:
            evaluation.begin(step, self._coordinator.check_stop)
            due = False
        return StepEnd(due and not evaluated, evaluated and journal.best(step))

    def _end_evaluation(self) -> bool:
        """Records the evaluation under way. Returns False if its servers were lost."""
        step = self._evaluation.under_way
        try:
            # The weight sync has waited for all responses. `check` does not raise StopRequested, which would lose them.
            self._journal.evaluation(self._evaluation.end(self._coordinator.check))
        except SyncNeeded as lost:
            self._journal.say(f"the evaluation of step {step} was lost: {lost}; the next one takes its place")
            return False
        return True

    def evaluate(self, step: int) -> StepEnd:
        """Has the servers, which have the weights of `step`, answer the problems of `eval.data`. Raises SyncNeeded if
        none of them is left; after a weight sync it may be called again."""
        evaluation, journal = self._evaluation, self._journal
        journal.progress.phase("evaluate", evaluation.responses)
        journal.evaluation(evaluation.run(step, self._coordinator.check_stop, journal.progress.count))
        return self.end_of(step)
