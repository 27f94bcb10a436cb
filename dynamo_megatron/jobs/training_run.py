"""What `train` and `sft` do around their loops: they stop on request, save, keep a failed step and export the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from typing import TypeVar

from dynamo_megatron.config import Config
from dynamo_megatron.jobs.checkpoints import Checkpoints, HasState
from dynamo_megatron.jobs.failed_step import write_failed_step
from dynamo_megatron.jobs.run import Job
from dynamo_megatron.policy.non_finite import NonFiniteError
from dynamo_megatron.policy.policy import Policy
from dynamo_megatron.policy.spikes import SPIKES, GradientSpike
from dynamo_megatron.runtime.coordination import Coordinator, StopRequested
from dynamo_megatron.runtime.heap import give_back_freed_memory
from dynamo_megatron.runtime.plain_text import error_line, show
from dynamo_megatron.tracking.journal import Journal
from dynamo_megatron.tracking.phases import Phases
from dynamo_megatron.tracking.profiler import StepProfiler
from dynamo_megatron.weight_sync.memory import DeviceMemory

T = TypeVar("T")


class TrainingRun:
    """One rank of a training run. `journal`: rank 0's. `start`: the last step that is done. `free_memory` ends servers
    that hold device memory which a save needs."""

    def __init__(
        self,
        config: Config,
        policy: Policy,
        coordinator: Coordinator,
        checkpoints: Checkpoints,
        phases: Phases,
        journal: Journal | None,
        start: int,
        free_memory: Callable[[], None] = lambda: None,
    ):
        self.config, self.policy, self.coordinator = config, policy, coordinator
        self.phases, self.start = phases, start
        self._checkpoints, self._journal, self._free_memory = checkpoints, journal, free_memory
        self._profiler = StepProfiler(config, policy.layout)

    def carry_out(self, train: Callable[[], None]) -> None:
        """Trains, saves and exports. Raises StopRequested, after saving, if a stop is requested."""
        if self._journal is not None:
            self._journal.open(self.start)
        try:
            with closing(self._profiler):
                train()
        except StopRequested:
            self._free_memory()
            self.save()
            self._checkpoints.settle()
            raise
        except (NonFiniteError, GradientSpike) as error:  # on every rank
            self._keep(error)
            raise
        self.coordinator.end_step()
        self.coordinator.begin_step(max(self.start, self.coordinator.step))  # the export may take as long as a step
        self.phases.begin("export")
        self._checkpoints.export_final()
        self.coordinator.end_step()
        if self._journal is not None:
            self._journal.ended(self.coordinator.step)

    def _keep(self, error: NonFiniteError | GradientSpike) -> None:
        """Completes a save under way, and writes the batch of a pass that gave NaN or infinity; collective over all
        ranks. If this fails, the user gets a warning: `error` ends the run and must be the last message."""
        step, say = self.coordinator.step, None if self._journal is None else self._journal.say
        self.coordinator.begin_step(step)  # the files may take as long as a step
        if say is not None:
            say(f"step {step}: {error_line(error)}")
        try:
            self._checkpoints.settle()
            if isinstance(error, NonFiniteError) and error.inputs is not None:
                self._free_memory()
                self.phases.begin("failed step")
                write_failed_step(self.policy, self.config, step, error, say)
        except (OSError, RuntimeError, MemoryError) as second:
            if say is not None or not isinstance(second, OSError):  # every rank raises OSError for another's file
                self._warn(f"saving after this error failed: {error_line(second)}")

    def _warn(self, line: str) -> None:
        if self._journal is not None:
            self._journal.say(f"warning: {line}")
        else:
            show(f"rank {self.coordinator.rank}: warning: {line}")

    # -- called by the loop ----------------------------------------------------------------------------------------
    def begin_step(self, step: int) -> None:
        self.coordinator.end_step()
        self.coordinator.begin_step(step)
        self._profiler.begin(step)

    def reached(self, step: int) -> None:
        """To be called when the policy has the weights of `step`. Completes a background save whose files have all been
        written."""
        self._profiler.end(step)
        self.phases.clock.begin("save")
        self._checkpoints.reached(step)
        give_back_freed_memory()
        self.phases.clock.begin("")

    def save(self) -> None:
        self.phases.begin("save")
        self._checkpoints.save()

    def save_if_due(self, step: int, stop_reason: str | None) -> None:
        """Saves every `checkpoint.every` steps and after the last step; never if `checkpoint.every` is null."""
        every = self.config.checkpoint.every
        if every and (stop_reason is not None or step % every == 0 or step == self.config.trainer.steps):
            self.save()

    def export_best(self) -> None:
        self.phases.begin("save")
        self._checkpoints.export_best()

    def on_rank_0(self, what: str, make: Callable[[], T]) -> T:
        return self.coordinator.on_rank_0(what, make, self.policy.layout)


def open_run(
    job: Job,
    policy: Policy,
    coordinator: Coordinator,
    state: Mapping[str, HasState],
    memory: DeviceMemory | None = None,
    free_memory: Callable[[], None] = lambda: None,
) -> TrainingRun:
    """Loads the last checkpoint, into the policy and on rank 0 into `state`, and writes the output folder's
    config.yaml; collective over all ranks. `memory`: None where servers have memory of their own."""
    config, leads = job.config, policy.layout.rank == 0
    parts = {**state, SPIKES: policy.spikes} if leads and policy.spikes is not None else state
    checkpoints = Checkpoints(policy, config, parts, job.journal.say if leads else None)
    start = checkpoints.resume()
    if leads:
        job.output.take_over(start)
    phases = Phases(job.journal.progress if leads else None, memory)
    return TrainingRun(config, policy, coordinator, checkpoints, phases, job.journal, start, free_memory)
