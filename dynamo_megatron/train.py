"""The training loop. Every rank runs it; what only rank 0 does is marked so.

DynaMO (arXiv 2602.19208) is two things in it: `allocate` divides a step's rollouts among its prompts by how much the
rewards of each have varied in earlier steps, and the policy's loss modulates each token's advantage by its entropy.

Rank 0's `Controller` has the prompts, the allocator's history, the client of the rollout servers and the record of the
run; all ranks together have the policy. A NaN ends the run, on all ranks and with one message that names the prompt:
`token_stats` raises it, and `update` before the optimizer's step. What survives a kill is on disk: the last checkpoint,
and each rollout of the step under way, which rank 0 writes as it finishes and a resumed run does not sample again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dynamo_megatron.controller import Controller
from dynamo_megatron.policy.batch import MiniBatch, TrainBatch, cut_mini_batches
from dynamo_megatron.policy.policy import ResponseStats
from dynamo_megatron.serving import Serving
from dynamo_megatron.tracking.resources import ResourceMeter, resource_metrics
from dynamo_megatron.training_run import TrainingRun
from dynamo_megatron.types import RolloutBatch
from dynamo_megatron.weight_sync.memory import memory_metrics
from dynamo_megatron.weight_sync.push import PushReport


class Trainer(TrainingRun):
    """The loop of `train` and of `sft`."""

    def train(self) -> None:
        """To `trainer.steps` or `trainer.stop_when`."""
        self.begin()
        self.phases.clock.restart()
        finished = self.evaluate(self.start)
        for step in range(self.start + 1, self.config.trainer.steps + 1):
            if finished:
                break
            self.coordinator.begin_step(step)
            self.train_step(step)
            self.checkpoints.reached(step)
            finished = self.evaluate(step)
            self.save_if_due(step, finished)

    def begin(self) -> None:
        """What comes before the first step."""

    def train_step(self, step: int) -> None:
        raise NotImplementedError

    def evaluate(self, step: int) -> str | None:
        """Returns why the run ends after `step`; None: it goes on."""
        raise NotImplementedError


class RLTrainer(Trainer):
    """`control` is rank 0's, None elsewhere. `end_servers` ends the servers that this rank has started."""

    def __init__(self, *run: Any, serving: Serving, control: Controller | None, end_servers: Callable[[], None]):
        super().__init__(*run)
        self.serving, self.control, self.end_servers = serving, control, end_servers
        self.resources = ResourceMeter()

    def begin(self) -> None:
        if self.control is not None:
            self.control.explain()
        self.serving.push(self.start, self.coordinator.check_stop)
        if self.journal is not None:
            self.journal.progress.start(self.start)

    def train_step(self, step: int) -> None:
        rollouts, mini_batches, stats = self.sample(step)
        # A pure function of the rollouts: their advantages within each group, and the weight of each token, which is
        # normalised over its mini-batch (algorithm.loss.aggregation), whatever the micro-batches and the layout are.
        batch = TrainBatch.build(rollouts, self.config, self.policy.layout.gather)
        reference = self.policy.reference_logprobs(rollouts, mini_batches)  # None without a KL term
        self.phases.begin("update")
        lr = self.config.learning_rate(step)
        updates = [self.policy.update(batch, mini_batch, stats, reference, lr) for mini_batch in mini_batches]
        pushed = self.serving.push(step)  # the servers sample step + 1 from these weights, proved to have arrived
        self.log(batch, stats, updates, pushed)

    def sample(self, step: int) -> tuple[RolloutBatch, list[MiniBatch], ResponseStats]:
        """The rollouts that `step` trains on, packed, and the policy's statistics of their tokens, on every rank.

        One round; with `algorithm.dynamic_sampling` (DAPO, arXiv 2503.14476) further rounds replace groups whose
        rewards are all equal. A group is the rollouts of one draw of a prompt.
        """
        control, rounds, kept = self.control, [], None

        def allocate() -> None:  # rank 0
            prompts = control.draw(step)
            control.allocate(prompts)  # by what `observe` saw in earlier steps; one without history counts as average

        def choose() -> np.ndarray | None:  # rank 0
            control.reject(stats.logprobs.numpy())  # what cannot have been sampled from the policy
            control.observe()  # the allocator learns; after it has allocated this step, and before the update
            return control.select()  # None: another round

        while kept is None:
            self.phases.begin("read data")
            self.from_rank_0(f"the prompts of step {step}", allocate)
            what = f"the rollouts of step {step}"
            rounds.append(self.serving.ask("generate", what, lambda: control.generate(), version=step - 1))
            mini_batches, stats = self.measure(rounds[-1])
            kept = self.from_rank_0(what, choose)
        rollouts = RolloutBatch.join(rounds).take(kept)
        if rollouts is not rounds[-1]:  # not all of one round: the updates need micro-batches of their own
            mini_batches, stats = self.measure(rollouts)
        return rollouts, mini_batches, stats

    def measure(self, rollouts: RolloutBatch) -> tuple[list[MiniBatch], ResponseStats]:
        """Mini-batches of whole groups, packed, and logprob, entropy and E[pi Lambda] of each response token under the
        policy, from the micro-batches of the updates: in the first update every ratio is exactly 1."""
        self.phases.begin("logprobs")
        members = cut_mini_batches(rollouts.group_ids, self.config.algorithm.loss.mini_batches)
        mini_batches = self.policy.pack(rollouts, members)
        return mini_batches, self.policy.token_stats(rollouts, mini_batches)

    def evaluate(self, step: int) -> str | None:
        """If `eval.every` says so, rank 0 has the servers answer the problems of `eval.data`."""
        verdict = self.from_rank_0(f"the end of step {step}", lambda: self.control.verdict(step))
        if verdict.evaluate:
            what = f"the evaluation of step {step}"
            verdict = self.serving.ask("evaluate", what, lambda: self.control.evaluate(step), version=step)
        if verdict.best:
            self.phases.begin("save")
            self.checkpoints.export_best()
        return verdict.finished

    def log(
        self,
        batch: TrainBatch,
        stats: ResponseStats,
        updates: Sequence[Mapping[str, float]],
        pushed: PushReport,
    ) -> None:
        layout, turns = self.policy.layout, self.phases.turns
        resources = layout.gather(self.resources.sample())
        moved = layout.gather(turns.report()) if turns is not None else None
        if self.control is not None:
            ranks = resource_metrics(resources, Path(self.config.output_dir))
            if moved is not None:
                ranks |= memory_metrics(moved)
            self.control.log(batch, stats, updates, pushed, self.phases.clock, ranks)
        self.phases.clock.restart()  # an evaluation and a save come after the metrics: their time is the next step's

    def stop(self) -> None:
        if self.phases.turns is not None:  # servers may still be generating, and a save needs their memory
            self.end_servers()
            self.phases.turns.know([])
