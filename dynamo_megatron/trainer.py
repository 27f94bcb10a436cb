"""The RL loop of DynaMO (arXiv 2602.19208), run by every rank; rank 0 owns prompts, allocator, rollouts and metrics."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dynamo_megatron.algorithm.allocation import RolloutAllocator
from dynamo_megatron.algorithm.premises import premise_warnings
from dynamo_megatron.checkpoints import Checkpoints
from dynamo_megatron.collection import Collector, collect
from dynamo_megatron.config import Config
from dynamo_megatron.coordination import Coordinator, StopRequested
from dynamo_megatron.data.stream import PromptStream
from dynamo_megatron.evaluation.periodic import PeriodicEvaluation
from dynamo_megatron.policy.policy import Policy
from dynamo_megatron.resharding.memory import MemoryTurns, memory_metrics
from dynamo_megatron.resharding.push import WeightPusher
from dynamo_megatron.rollout.recorded import RecordedRollouts
from dynamo_megatron.rollout.server import takes_turns
from dynamo_megatron.rollout.worker import RolloutWorker
from dynamo_megatron.serving import Serving
from dynamo_megatron.tracking.journal import Journal
from dynamo_megatron.tracking.resources import ResourceMeter, resource_metrics
from dynamo_megatron.tracking.step_line import legend, step_line
from dynamo_megatron.tracking.step_metrics import Clock, step_metrics


class Trainer:
    """`stream`, `allocator`, `rollout`, `evaluation` (None: never) and `journal` are rank 0's, None elsewhere.
    `end_servers` ends those that this rank has started."""

    def __init__(
        self,
        config: Config,
        policy: Policy,
        coordinator: Coordinator,
        stream: PromptStream | None,
        allocator: RolloutAllocator | None,
        rollout: RolloutWorker | RecordedRollouts | None,
        evaluation: PeriodicEvaluation | None,
        journal: Journal | None,
        end_servers: Callable[[], None],
    ):
        self.config, self.policy, self.coordinator = config, policy, coordinator
        self.evaluation, self.journal, self.end_servers = evaluation, journal, end_servers
        self.collector = Collector(config, stream, allocator, rollout, journal) if journal is not None else None
        self.layout, self.output = policy.layout, Path(config.output_dir)
        self.resources = ResourceMeter()
        say = journal.say if journal is not None else None
        self.turns = MemoryTurns(policy, rollout) if takes_turns(config.rollout) else None
        pusher = WeightPusher(policy, rollout, coordinator)
        self.serving = Serving(pusher, coordinator, self.layout, say, self.turns)
        parts = {"stream": stream, "allocator": allocator.history} if allocator is not None else {}
        self.checkpoints = Checkpoints(policy, config, parts, say)
        self.start = self.checkpoints.resume()

    def run(self) -> None:
        """Trains to `trainer.steps` or `trainer.stop_when`. Raises StopRequested, after saving, where asked to stop."""
        config, policy = self.config, self.policy
        if self._leads:
            self.journal.open(self.start)
            self._say_premises()
        self._say_phase("pushing weights")
        self.serving.push(self.start, self.coordinator.check_stop)
        if self._leads:
            self.journal.progress.start(self.start)
        clock = Clock()
        try:
            self._save()  # makes up for an export that a kill cut off
            finished = self._look(self.start, clock)
            for step in range(self.start + 1, config.trainer.steps + 1):
                if finished:
                    break
                self.coordinator.step = step
                clock.seconds["save"] = self.checkpoints.take_waited()
                batch, stats = collect(step, policy, self.coordinator, self.serving, self.collector, clock)
                with clock("logprobs"):
                    reference = policy.reference_logprobs(batch)
                self._say_phase("update")
                with clock("update"):
                    lr = config.learning_rate(step)
                    updates = [policy.update(batch, mini, stats, reference, lr) for mini in batch.mini_batches]
                self._say_phase("push")
                pushed = self.serving.push(step)
                resources = self.layout.gather(self.resources.sample())
                moved = self.layout.gather(self.turns.report()) if self.turns is not None else None
                if self._leads:
                    kl, collected = reference is not None, self.collector.collected
                    metrics = step_metrics(
                        step, collected, batch, stats, updates, lr, pushed, clock, config, measures_kl=kl
                    )
                    metrics |= resource_metrics(resources, self.output)
                    if moved is not None:
                        metrics |= memory_metrics(moved)
                    line = step_line(metrics, config.trainer.steps, self.journal.width)
                    self.journal.step(metrics, line, collected.allocation_rows())
                clock = Clock()  # metrics come before evaluation and save, whose times therefore go to the next step
                self.checkpoints.reached(step)
                finished = self._look(step, clock)
                every = config.checkpoint.every
                if every and (finished or step % every == 0 or step == config.trainer.steps):
                    self._save()
        except StopRequested:
            if self.turns is not None:  # they may be generating still, and their memory is needed to save
                self.end_servers()
                self.turns.know([])
            self._save()
            self.checkpoints.settle()
            raise
        self.coordinator.step = max(self.start, self.coordinator.step)  # the export may take as long as a step
        self._say_phase("export")
        self.serving.memory("save")
        self.checkpoints.export_final()
        if self._leads:
            self.journal.ended(self.coordinator.step)

    def _say_premises(self) -> None:
        allocation = self.config.algorithm.allocation
        if allocation.kind == "neyman":
            alike = "in the pool, so that a first pass is uniform"
            if allocation.prior_by is not None:
                alike = f"of its {allocation.prior_by}"
            self.journal.say(f"allocation: a prompt without history gets what the average prompt gets {alike}")
        for warning in premise_warnings(self.config):
            self.journal.say(f"warning: {warning}")
        self.journal.say(legend(self.config.trainer.steps, self.journal.width))

    def _look(self, step: int, clock: Clock) -> str | None:
        """Evaluates where it is time to; every rank learns whether the run is finished early, and why."""

        def judge() -> tuple[str | None, bool]:
            evaluation, journal = self.evaluation, self.journal
            due = evaluation is not None and (journal.finished() or evaluation.due(step))
            if due and not journal.evaluated(step):
                self._say_phase("evaluate", evaluation.responses)
                with clock("evaluate"):
                    summary = evaluation.run(step, self.coordinator.check_stop, journal.progress.count, journal.say)
                journal.evaluation(summary)
            # Asked also of an evaluation from before a kill, which may have come between it and its export.
            return journal.finished(), due and journal.best(step)

        finished, best = self.serving.ask(f"look-{step}", f"the evaluation of step {step}", judge, version=step)
        if best:
            self.serving.memory("save")
            self.checkpoints.export_best()
        return finished

    def _save(self) -> None:
        self._say_phase("save")
        self.serving.memory("save")
        self.checkpoints.save()

    def _say_phase(self, name: str, total: int | None = None) -> None:
        if self._leads:
            self.journal.progress.phase(name, total)

    @property
    def _leads(self) -> bool:
        return self.layout.rank == 0
