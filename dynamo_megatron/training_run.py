"""What a training command does around its steps: it stops on request, saves, and exports the model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar

from dynamo_megatron.config import Config
from dynamo_megatron.jobs.checkpoints import Checkpoints
from dynamo_megatron.jobs.failed_step import write_failed_step
from dynamo_megatron.phases import Phases
from dynamo_megatron.policy.non_finite import NonFiniteError
from dynamo_megatron.policy.policy import Policy
from dynamo_megatron.policy.spikes import GradientSpike
from dynamo_megatron.runtime.coordination import Coordinator, StopRequested
from dynamo_megatron.runtime.heap import give_back_freed_memory
from dynamo_megatron.runtime.plain_text import error_line, show
from dynamo_megatron.tracking.journal import Journal
from dynamo_megatron.tracking.profiler import StepProfiler

T = TypeVar("T")


@dataclass(frozen=True)
class RunParts:
    """What each rank of a run has, with `train` and `sft` alike."""

    config: Config
    policy: Policy
    coordinator: Coordinator
    checkpoints: Checkpoints
    phases: Phases
    journal: Journal | None  # rank 0's
    start: int  # the last step that is done when this process starts


class TrainingRun:
    """One rank of a training run."""

    def __init__(self, parts: RunParts):
        self.config, self.policy, self.coordinator = parts.config, parts.policy, parts.coordinator
        self.checkpoints, self.phases, self.journal = parts.checkpoints, parts.phases, parts.journal
        self.start = parts.start
        self.profiler = StepProfiler(parts.config, parts.policy.layout)

    def run(self) -> None:
        """Trains, saves and exports. Raises StopRequested, after saving, if a stop is requested."""
        if self.journal is not None:
            self.journal.open(self.start)
        try:
            with closing(self.profiler):
                self.train()
        except StopRequested:
            self.stop()
            self.save()
            self.checkpoints.settle()
            raise
        except (NonFiniteError, GradientSpike) as error:  # on every rank
            self.keep(error)
            raise
        self.coordinator.end_step()
        self.coordinator.begin_step(max(self.start, self.coordinator.step))  # the export may take as long as a step
        self.phases.begin("export")
        self.checkpoints.export_final()
        self.coordinator.end_step()
        if self.journal is not None:
            self.journal.ended(self.coordinator.step)

    def keep(self, error: NonFiniteError | GradientSpike) -> None:
        """Completes a save under way, and writes the batch of a pass that gave NaN or infinity; collective over all
        ranks. If this fails, the user gets a warning: `error` ends the run and must be the last message."""
        step, say = self.coordinator.step, None if self.journal is None else self.journal.say
        self.coordinator.begin_step(step)  # the files may take as long as a step
        if say is not None:
            say(f"step {step}: {error_line(error)}")
        try:
            self.checkpoints.settle()
            if isinstance(error, NonFiniteError) and error.inputs is not None:
                self.stop()
                self.phases.begin("failed step")
                write_failed_step(self.policy, self.config, step, error, say)
        except (OSError, RuntimeError, MemoryError) as second:
            if say is not None or not isinstance(second, OSError):  # every rank raises OSError for another's file
                self.warn(f"saving after this error failed: {error_line(second)}")

    def warn(self, line: str) -> None:
        """Shows the user a warning of this rank."""
        if self.journal is not None:
            self.journal.say(f"warning: {line}")
        else:
            show(f"rank {self.coordinator.rank}: warning: {line}")

    def train(self) -> None:
        """Trains all steps. Raises StopRequested."""
        raise NotImplementedError

    def stop(self) -> None:
        """Stops servers if a save needs their memory."""

    def begin_step(self, step: int) -> None:
        self.coordinator.end_step()
        self.coordinator.begin_step(step)
        self.profiler.begin(step)

    def reached(self, step: int) -> None:
        """To be called when the policy has the weights of `step`. Completes a background save whose files have all been
        written."""
        if (failed := self.profiler.end(step)) is not None:
            self.warn(failed)
        self.phases.clock.begin("save")
        self.checkpoints.reached(step)
        give_back_freed_memory()
        self.phases.clock.begin("")

    def save(self) -> None:
        self.phases.begin("save")
        self.checkpoints.save()

    def save_if_due(self, step: int, stop_reason: str | None) -> None:
        """Saves every `checkpoint.every` steps and after the last step; never if `checkpoint.every` is null."""
        every = self.config.checkpoint.every
        if every and (stop_reason is not None or step % every == 0 or step == self.config.trainer.steps):
            self.save()

    def on_rank_0(self, what: str, make: Callable[[], T]) -> T:
        """Calls `make` on rank 0 and returns its result on every rank. `what`: what messages say is waited for."""
        return self.coordinator.on_rank_0(what, make, self.policy.layout)
