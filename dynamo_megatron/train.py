"""The training loop. Every rank runs it; functions marked "rank 0" run on rank 0 alone.

Rank 0 has a `Controller`: the data, the allocator, the client of the rollout servers and the logs. It divides the
budget of rollouts among the prompts of a round by the history of their rewards (`Controller.allocate`). The policy is
sharded over all ranks. They get from rank 0 the rollouts, the `Selection` of those to train on, and whether the run
evaluates or exports after the step. Stops and failures are announced in a key-value store.

NonFiniteError ends the run on every rank if a logprob, an entropy, the loss or the gradient norm is NaN or infinite,
before that optimizer's step. The policy's batch and weights are kept in `nonfinite/`, for `replay --step`.

After a kill the same command resumes from the last checkpoint: policy and critic with their optimizers, position in the
data, the allocator's history. A rollout is on disk once it is scored, and those after the checkpoint are used again, up
to the first step that lacks one (with `rollout.max_staleness` all those that the checkpoint's weights can have
sampled). A changed model, method, data or seed is refused; with another optimizer, layout or kernels only the rollouts
of the first step after the checkpoint are used again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dynamo_megatron.controller import Controller
from dynamo_megatron.policy.batch import MiniBatch, TrainBatch, cut_mini_batches, loss_divisors
from dynamo_megatron.policy.critic import Critic
from dynamo_megatron.rollout.teacher import prompt_logprobs
from dynamo_megatron.rounds import Round, Selection
from dynamo_megatron.serving import Serving
from dynamo_megatron.tracking.resources import rank_memory, resource_metrics
from dynamo_megatron.tracking.step_metrics import step_metrics
from dynamo_megatron.types import RolloutBatch, TokenStats
from dynamo_megatron.weight_sync.sync import SyncReport


class Sampled(NamedTuple):
    """What a step trains on."""

    rollouts: RolloutBatch
    mini_batches: list[MiniBatch]  # one for each update: the rollouts that this rank computes, packed
    stats: TokenStats | None  # float32 [R], of all R response tokens under the weights of step - 1; None: not measured
    selection: Selection
    rounds: list[Round]  # on rank 0; empty elsewhere


class Trainer:
    """One rank of a run. `run`: jobs/training_run.py's TrainingRun, which stops, saves and exports; its methods are
    collective, `run.start` is the last step that was done before, and `run.on_rank_0` calls a function on rank 0 and
    returns its result on every rank. `controller`: rank 0's, None on the other ranks. `critic`: PPO's;
    None: the method has none."""

    def __init__(
        self,
        run: Any,
        serving: Serving,
        controller: Controller | None,
        critic: Critic | None = None,
    ):
        self.run, self.config, self.policy, self.phases = run, run.config, run.policy, run.phases
        self.serving, self.controller, self.critic = serving, controller, critic

    def train(self) -> None:
        """Trains until `trainer.steps`."""
        run = self.run
        self.serving.sync(run.start, run.coordinator.check_stop)
        if self.controller is not None:
            self.controller.begin(run.start)
        self.phases.clock.restart()
        if self.phases.memory is not None:
            self.phases.memory.take_seconds()  # what the start has moved is no part of a step
        run.save()  # at most an export that a kill prevented
        self.evaluate_if_due(run.start)
        for step in range(run.start + 1, self.config.trainer.steps + 1):
            run.begin_step(step)
            sampled = self.sample(step)
            batch = self.advantages(step, sampled)
            sampled, batch, updates = self.update(step, sampled, batch)
            fits = []  # of PPO's critic
            if self.critic is not None:
                fits = self.critic.fit_values(step, batch, sampled.mini_batches, self.phases.begin)
            # Waits until each server has proved by checksums that it has the new weights (rollout.proof), or has
            # failed. Servers with the new weights sample step + 1. One that failed is restarted, and joins at a later
            # weight sync.
            synced = self.serving.sync(step)
            self.log(step, sampled, batch, updates, fits, synced)
            run.reached(step)
            self.evaluate_if_due(step)
            run.save_if_due(step)

    def sample(self, step: int) -> Sampled:
        """Samples rollouts from the weights of step - 1, or from weights up to `rollout.max_staleness` steps older.

        There is usually one round. With `algorithm.dynamic_sampling` (DAPO, arXiv 2503.14476) groups whose rewards are
        all equal are dropped (unless all are), and further rounds draw other prompts in their place. A group is the
        rollouts of one draw of a prompt. Its group_id is set when the rollouts are requested. With
        `algorithm.sequential` further rounds sample prompts of the first round again. All rollouts of such a prompt
        then become one group (`Selection.group_ids`).
        """
        controller, rounds, batches, selection = self.controller, [], [], None

        def draw_and_allocate() -> None:  # rank 0
            # With `rollout.max_staleness` `begin_round` also draws, allocates and sends the first rounds of later
            # steps, which the servers sample while this step trains.
            rounds.append(controller.begin_round(step, rounds))

        def generate() -> RolloutBatch:  # rank 0
            return controller.generate(step, rounds[-1])

        def select() -> Selection | None:  # rank 0
            if stats is not None:
                self.reject_and_observe(step, rounds, batches[-1], stats)
            return controller.select(step, rounds)

        measure = self.config.algorithm.measures_first
        while selection is None:
            self.phases.begin("read data")
            self.run.on_rank_0(f"the prompts of step {step}", draw_and_allocate)
            batches.append(self.serving.ask("generate", f"the rollouts of step {step}", generate, version=step - 1))
            measure = measure or not np.isfinite(batches[-1].engine_logprobs).all()  # such a rollout will be rejected
            mini_batches, stats = self.pack_and_measure(batches[-1], measure)
            selection = self.run.on_rank_0(f"the rollouts of step {step}", select)
            if selection is None:
                del mini_batches, stats  # frees device memory for the servers of the next round
        rollouts = selection.of(RolloutBatch.join(batches))
        if rollouts is not batches[-1]:  # rounds were joined, or rollouts were left out
            mini_batches, stats = self.pack_and_measure(rollouts, measure)
        return Sampled(rollouts, mini_batches, stats, selection, rounds)

    def reject_and_observe(self, step: int, rounds: list[Round], rollouts: RolloutBatch, stats: TokenStats) -> bool:
        """On rank 0: rejects a rollout of the last round if the weights that sampled it are too old, or if the server's
        logprobs of its tokens differ too much from the policy's (`stats`). Adds the others to the history that
        `allocate` reads, including groups that `select` drops. Returns whether one was rejected."""
        self.controller.reject(step, rounds, stats.logprobs.numpy())
        self.controller.observe(step, rounds[-1], rollouts, stats)
        return len(rounds[-1].kept) < rounds[-1].sampled

    def pack_and_measure(self, rollouts: RolloutBatch, measure: bool) -> tuple[list[MiniBatch], TokenStats | None]:
        """Packs whole groups into mini-batches, and these into micro-batches. The statistics of the tokens (logprob,
        entropy) and the updates run over the same micro-batches: in the first update the ratio of every token to the
        policy at the start of the step is exactly 1."""
        self.phases.begin("logprobs")
        rows = cut_mini_batches(rollouts.group_ids, self.config.algorithm.loss.mini_batches)
        mini_batches = self.policy.pack(rollouts, rows)
        return mini_batches, self.policy.token_stats(rollouts, mini_batches) if measure else None

    def advantages(self, step: int, sampled: Sampled) -> TrainBatch:
        """Gives each of S rollouts an advantage: its reward less a baseline, by default (`rloo`) the mean reward of the
        other rollouts of its group; with `algorithm.advantage.kind: history` also of earlier steps, as of before these
        rollouts (`selection.baseline`), and with `gae` each token one, from the critic's values. And gives its tokens
        their weight in the loss."""
        rollouts, selection = sampled.rollouts, sampled.selection
        # The loss of a mini-batch is sum(weight * token's loss) over all ranks. `algorithm.loss.aggregation` chooses
        # what a rollout's tokens are divided by, float64 [S]; by default (prompt_mean)
        # groups of the mini-batch * rollouts of the token's group * rollout.max_new_tokens.
        divisor = loss_divisors(rollouts, self.config)
        weights = self.config.policy_weight(step) / divisor
        implicit = self.policy.implicit_rewards(rollouts, sampled.mini_batches)  # None without the reward prime
        teacher, gather = self.teacher_gap(sampled), self.policy.layout.gather
        values = self.critic and self.critic.values(rollouts, sampled.mini_batches, self.phases.begin)
        return TrainBatch.build(rollouts, self.config, gather, selection.baseline, weights, implicit, teacher, values)

    def teacher_gap(self, sampled: Sampled) -> np.ndarray | None:
        """float64 [R]: log p_teacher - log p_policy of each response token; None without `algorithm.teacher`."""
        if (teacher := self.config.algorithm.teacher) is None:
            return None
        rollouts = sampled.rollouts
        if teacher.is_url:
            what = f"the logprobs of the teacher at {teacher.path}"
            check_stop = self.run.coordinator.check_stop
            found = self.run.on_rank_0(what, lambda: prompt_logprobs(teacher, rollouts, check_stop))
        else:
            found = self.policy.token_stats(rollouts, sampled.mini_batches, "algorithm.teacher.path").logprobs.numpy()
        return found.astype(np.float64) - sampled.stats.logprobs.numpy()

    def update(
        self, step: int, sampled: Sampled, batch: TrainBatch
    ) -> tuple[Sampled, TrainBatch, list[dict[str, float]]]:
        """Makes an optimizer step on each mini-batch. Each token's advantage is scaled by the entropy of the policy
        there, with algorithm.modulation. Returns what it trained on, with the statistics, and the sums of each update.

        Where the method needs no statistics before (`algorithm.old_logprobs`), the update's forward pass gives them. If
        a rollout is rejected by them, its group has other advantages, and the gradient is computed again."""
        reference = self.policy.reference_logprobs(sampled.rollouts, sampled.mini_batches)  # None without a KL term
        self.phases.begin("update")
        lr = self.config.learning_rate(step)
        if sampled.stats is not None:
            updates = [self.policy.update(batch, mini, sampled.stats, reference, lr) for mini in sampled.mini_batches]
        else:
            (mini,) = sampled.mini_batches
            gradient = self.policy.gradient(batch, mini, None, reference, lr)
            rollouts, rounds = sampled.rollouts, sampled.rounds

            def select() -> Selection | None:  # rank 0
                rejects = self.reject_and_observe(step, rounds, rollouts, gradient.stats)
                return self.controller.select(step, rounds) if rejects else None

            selection = self.run.on_rank_0(f"the check of the rollouts of step {step}", select)
            if selection is not None:
                rollouts = selection.of(rollouts)
                sampled = Sampled(rollouts, *self.pack_and_measure(rollouts, True), selection, rounds)
                return self.update(step, sampled, self.advantages(step, sampled))
            sampled, updates = sampled._replace(stats=gradient.stats), [self.policy.step(gradient)]
        return sampled, batch, updates

    def log(
        self,
        step: int,
        sampled: Sampled,
        batch: TrainBatch,
        updates: Sequence[Mapping[str, float]],
        fits: Sequence[Mapping[str, float]],
        synced: SyncReport,
    ) -> None:
        layout, memory, clock = self.policy.layout, self.phases.memory, self.phases.clock
        resources = layout.gather(rank_memory())
        routing = self.policy.routing.take() if self.policy.routing is not None else {}
        if self.controller is not None:
            record = self.controller.record(step, sampled.rounds)
            metrics = step_metrics(record, batch, sampled.stats, updates, fits, synced, clock, self.config)
            metrics |= resource_metrics(resources, Path(self.config.output_dir)) | routing
            if memory is not None:
                metrics["time/memory"] = memory.take_seconds()
            self.controller.log(record, metrics, batch, sampled.stats)
        clock.restart()  # the evaluation and the save of this step count into the time of the next one

    def evaluate_if_due(self, step: int) -> None:
        """Evaluates the policy if that is due, and exports it if it is the best."""
        end = self.run.on_rank_0(f"the end of step {step}", lambda: self.controller.end_of(step))
        if end.evaluate:
            what = f"the evaluation of step {step}"
            end = self.serving.ask("evaluate", what, lambda: self.controller.evaluate(step), version=step)
        if end.is_best:
            self.run.export_best()
