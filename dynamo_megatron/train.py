"""The training loop. Every rank runs it; the functions marked "rank 0" run on rank 0 alone.

DynaMO (arXiv 2602.19208) adds two things to training on groups of rollouts. `Controller.allocate` divides the budget of
rollouts among the prompts of a round, from the history of each prompt and of all prompts together. By default a prompt
gets more rollouts the larger p(1 - p) is expected to be, where p is the probability of a correct rollout. p is
estimated from the prompt's own rollouts so far and those of all prompts (algorithm.allocation). `Policy.update` scales
each token's advantage by the entropy of the policy at that token (algorithm.modulation).

Rank 0 has a `Controller`: the data, the allocator with its history of each prompt's rollouts, the client of the rollout
servers, and the run's log files. The policy is distributed over all ranks. In a step the other ranks get three things
from rank 0: first, the rollouts; second, a `Selection` of the rollouts to train on, with their groups, their weights in
the loss and, for methods that use one (algorithm.advantage.kind: history), their baseline; third, whether the run
evaluates, exports or ends after the step. All ranks also take part in the policy's own collectives, in saving, in
sending the weights to the servers, in gathering the metrics, and in a check that a user's advantage function returns
the same values on every rank. Stops and failures are announced through a key-value store.

NonFiniteError is raised on every rank, and ends the run, if a logprob or an entropy is NaN or infinite (in
`token_stats`, which also computes the reference model's), or if the loss or the gradient norm is (in `update`, before
the optimizer's step). The inputs of that pass are then written to a folder (failed_step.py). It also ends the run if an
update has left such weights (in `check_weights`, before they are sent or saved). A server's reply that has such a
logprob is rejected, and its request is sent again.

After a kill the same command continues from the last checkpoint: policy, optimizer, position in the data, allocator's
history. Each rollout is on disk as soon as it is scored. By default (`rollout.max_staleness: 0`) the rollouts of all
steps after the checkpoint are used again. Rollouts that failed, were rejected or could not be scored are sampled again.
Their step may then give other weights, so the rollouts of the steps after it are removed. If a setting that the weights
depend on (optimizer, layout, kernels) has changed, only the rollouts of the first step after the checkpoint are used
again. With a larger `max_staleness` the checkpoint contains the rounds that had been sent to the servers, and partial
responses are also on disk, as of the last weight sync. Of each response, finished or not, the tokens before the first
one that was sampled from weights later than the checkpoint's are used again; sampling continues from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dynamo_megatron.controller import Controller
from dynamo_megatron.policy.batch import MiniBatch, TrainBatch, cut_mini_batches
from dynamo_megatron.rounds import Round, Selection
from dynamo_megatron.serving import Serving
from dynamo_megatron.tracking.resources import ResourceMeter, resource_metrics
from dynamo_megatron.tracking.step_metrics import step_metrics
from dynamo_megatron.training_run import RunParts, TrainingRun
from dynamo_megatron.types import RolloutBatch, TokenStats
from dynamo_megatron.weight_sync.memory import memory_metrics
from dynamo_megatron.weight_sync.push import PushReport


class Trainer(TrainingRun):
    """The loop of the commands `train` and `sft`."""

    def train(self) -> None:
        """Trains until `trainer.steps` or `trainer.stop_when`."""
        self.before_first_step()
        self.phases.clock.restart()
        self.save()  # finishes an interrupted export
        stop_reason = self.evaluate_if_due(self.start)
        for step in range(self.start + 1, self.config.trainer.steps + 1):
            if stop_reason is not None:
                break
            self.begin_step(step)
            self.train_step(step)
            self.reached(step)
            stop_reason = self.evaluate_if_due(step)
            self.save_if_due(step, stop_reason)

    def before_first_step(self) -> None:
        raise NotImplementedError

    def train_step(self, step: int) -> None:
        raise NotImplementedError

    def evaluate_if_due(self, step: int) -> str | None:
        """In `train`, evaluates the policy if that is due. Returns why the run ends after `step`; None: it goes on."""
        raise NotImplementedError


class Sampled(NamedTuple):
    """What a step trains on."""

    rollouts: RolloutBatch
    mini_batches: list[MiniBatch]  # one for each update: the rollouts that this rank computes, packed
    stats: TokenStats  # float32 [R], of all R response tokens under the weights of step - 1
    selection: Selection
    rounds: list[Round]  # on rank 0; empty elsewhere


class RLTrainer(Trainer):
    """One rank of a run. `controller`: rank 0's, None on the other ranks. `end_servers` stops the rollout servers of
    this node."""

    def __init__(
        self, parts: RunParts, serving: Serving, controller: Controller | None, end_servers: Callable[[], None]
    ):
        super().__init__(parts)
        self.serving, self.controller, self.end_servers = serving, controller, end_servers
        self.resources = ResourceMeter()

    def before_first_step(self) -> None:
        if self.controller is not None:
            self.controller.print_notes()
        self.serving.push(self.start, self.coordinator.check_stop)
        if self.journal is not None:
            self.journal.progress.start(self.start)

    def train_step(self, step: int) -> None:
        sampled, gather = self.sample(step), self.policy.layout.gather
        rollouts, mini_batches, selection = sampled.rollouts, sampled.mini_batches, sampled.selection
        # Each rollout gets an advantage from the rewards of its group (with algorithm.advantage.kind: history also from
        # rewards of earlier steps). A mini-batch's loss is sum(weight * token's loss) over all ranks. The weight is
        # selection.weights (None: 1) / N; algorithm.loss.aggregation chooses N, by default
        # N = groups of the mini-batch * rollouts of the token's group * rollout.max_new_tokens.
        implicit = self.policy.implicit_rewards(rollouts, mini_batches)  # None without the reward prime
        batch = TrainBatch.build(rollouts, self.config, gather, selection.baseline, selection.weights, implicit)
        reference = self.policy.reference_logprobs(rollouts, mini_batches)  # None without a KL term
        self.phases.begin("update")
        lr = self.config.learning_rate(step)
        updates = [self.policy.update(batch, mini, sampled.stats, reference, lr) for mini in mini_batches]
        self.policy.check_weights(lr)
        # Waits until each server has proved by checksums that it has the new weights (rollout.proof), or has failed.
        # Servers with the new weights sample step + 1. A server that failed is restarted, and joins at a later push.
        pushed = self.serving.push(step)
        self.log(step, sampled, batch, updates, pushed)

    def sample(self, step: int) -> Sampled:
        """Samples rollouts from the weights of step - 1, or from weights up to `rollout.max_staleness` steps older.

        There is usually one round. With `algorithm.dynamic_sampling` (DAPO, arXiv 2503.14476) groups whose rewards are
        all equal are dropped, and further rounds draw other prompts in their place. A group is the rollouts of one draw
        of a prompt. Its group_id is set when the rollouts are requested, in `Controller.generate` (with
        `rollout.max_staleness` in `begin_round`). With `algorithm.sequential` further rounds sample prompts of the
        first round again. Unless `sequential.explore` is set, all rollouts of such a prompt then become one group
        (`Selection.group_ids`).
        """
        controller, rounds, batches, selection = self.controller, [], [], None

        def draw_and_allocate() -> None:  # rank 0
            # With `rollout.max_staleness` `begin_round` also draws, allocates and sends the first rounds of later
            # steps, which the servers sample while this step trains.
            rounds.append(controller.begin_round(step, rounds))

        def generate() -> RolloutBatch:  # rank 0
            return controller.generate(step, rounds[-1])

        def select() -> Selection | None:  # rank 0
            # Rejects a rollout if the weights that sampled it are too old, or if the server's logprobs of its tokens
            # differ too much from the policy's (`stats`).
            controller.reject(step, rounds, stats.logprobs.numpy())
            # Adds the other rollouts to the history that `allocate` reads, including groups that `select` drops.
            controller.observe(step, rounds[-1], batches[-1], stats)
            return controller.select(step, rounds)

        while selection is None:
            self.phases.begin("read data")
            self.on_rank_0(f"the prompts of step {step}", draw_and_allocate)
            batches.append(self.serving.ask("generate", f"the rollouts of step {step}", generate, version=step - 1))
            mini_batches, stats = self.pack_and_measure(step, batches[-1])
            selection = self.on_rank_0(f"the rollouts of step {step}", select)
            if selection is None:
                del mini_batches, stats  # frees device memory for the servers of the next round
        rollouts = selection.of(RolloutBatch.join(batches))
        if rollouts is not batches[-1]:  # rounds were joined, or rollouts were left out
            mini_batches, stats = self.pack_and_measure(step, rollouts)
        return Sampled(rollouts, mini_batches, stats, selection, rounds)

    def pack_and_measure(self, step: int, rollouts: RolloutBatch) -> tuple[list[MiniBatch], TokenStats]:
        """Packs whole groups into mini-batches, and these into micro-batches. The statistics of the tokens (logprob,
        entropy) and the updates run over the same micro-batches: in the first update the ratio of every token to the
        policy at the start of the step is exactly 1."""
        self.phases.begin("logprobs")
        rows = cut_mini_batches(rollouts.group_ids, self.config.algorithm.loss.mini_batches)
        mini_batches = self.policy.pack(rollouts, rows)
        return mini_batches, self.policy.token_stats(rollouts, mini_batches)

    def evaluate_if_due(self, step: int) -> str | None:
        """As Trainer.evaluate_if_due. With `checkpoint.export_hf: best` it also exports a model that is the best."""
        end = self.on_rank_0(f"the end of step {step}", lambda: self.controller.end_of(step))
        if end.evaluate:
            what = f"the evaluation of step {step}"
            end = self.serving.ask("evaluate", what, lambda: self.controller.evaluate(step), version=step)
        if end.is_best:
            self.phases.begin("save")
            self.checkpoints.export_best()
        return end.stop_reason

    def log(
        self,
        step: int,
        sampled: Sampled,
        batch: TrainBatch,
        updates: Sequence[Mapping[str, float]],
        pushed: PushReport,
    ) -> None:
        layout, memory, clock = self.policy.layout, self.phases.memory, self.phases.clock
        resources = layout.gather(self.resources.sample())
        moved = layout.gather(memory.report()) if memory is not None else None
        if self.controller is not None:
            record = self.controller.record(step, sampled.rounds)
            metrics = step_metrics(record, batch, sampled.stats, updates, pushed, clock, self.config)
            metrics |= resource_metrics(resources, Path(self.config.output_dir))
            if moved is not None:
                metrics |= memory_metrics(moved)
            self.controller.log(record, metrics, batch, sampled.stats)
        clock.restart()  # the evaluation and the save of this step count into the time of the next one

    def stop(self) -> None:
        if self.phases.memory is not None:  # the save needs device memory that generating servers hold
            self.end_servers()
            self.phases.memory.set_servers([])
