"""What `train`, `sft` and `dpo` do around their loops: they stop on request, save, keep a failed step and export."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any, TypeVar

from dynamo_megatron.checkpoint.folder import checkpoint_folders
from dynamo_megatron.checkpoint.policy_state import begin_save
from dynamo_megatron.config.files import to_plain
from dynamo_megatron.jobs.checkpoints import Checkpoints
from dynamo_megatron.jobs.run import Job
from dynamo_megatron.policy.non_finite import NonFiniteError
from dynamo_megatron.policy.policy import Policy
from dynamo_megatron.policy.spikes import SPIKES, GradientSpike
from dynamo_megatron.runtime.coordination import Coordinator, StopRequested
from dynamo_megatron.runtime.plain_text import error_line, show
from dynamo_megatron.runtime.process_signals import give_back_freed_memory
from dynamo_megatron.runtime.run_folder import FAILED_STEPS, PASS_FILE
from dynamo_megatron.tracking.phases import Phases
from dynamo_megatron.tracking.resources import StepProfiler
from dynamo_megatron.weight_sync.memory import DeviceMemory

T = TypeVar("T")


class TrainingRun(Checkpoints):
    """One rank of a training run. `start`: the last step that is done."""

    def __init__(
        self,
        job: Job,
        policy: Policy,
        coordinator: Coordinator,
        state: Mapping[str, Any],
        memory: DeviceMemory | None = None,
        free_memory: Callable[[], None] = lambda: None,
        critic: Policy | None = None,
    ):
        """Loads the last checkpoint, into the policy and on rank 0 into `state`, and writes the output folder's
        config.yaml. `memory`: None where servers have memory of their own; `free_memory` ends servers that hold device
        memory which a save needs."""
        self._journal, self.coordinator, self._free_memory = job.journal, coordinator, free_memory
        leads = job.journal is not None
        parts = state if policy.spikes is None else {**state, SPIKES: policy.spikes}
        self.phases = Phases(job.journal.progress if leads else None, memory)
        self._profiler = StepProfiler(job.config, policy.layout)
        super().__init__(policy, job.config, parts, job.journal.say if leads else None, critic)
        self.start = self.resume()
        if leads:
            job.output.take_over(self.start)

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
            self.settle()
            raise
        except (NonFiniteError, GradientSpike) as error:  # on every rank
            self._keep(error)
            raise
        self.coordinator.end_step()
        self.coordinator.begin_step(max(self.start, self.coordinator.step))  # the export may take as long as a step
        self.phases.begin("export")
        self.export_final()
        self.coordinator.end_step()
        if self._journal is not None:
            self._journal.ended(self.coordinator.step)

    def _keep(self, error: NonFiniteError | GradientSpike) -> None:
        """Completes a save under way, and writes the batch of a pass that gave NaN or infinity. If this fails, the user
        gets a warning: `error` ends the run and must be the last message."""
        step = self.coordinator.step
        self.coordinator.begin_step(step)  # the files may take as long as a step
        if self._say is not None:
            self._say(f"step {step}: {error_line(error)}")
        try:
            self.settle()
            if isinstance(error, NonFiniteError) and error.inputs is not None:
                self._free_memory()
                self.phases.begin("failed step")
                self._write_failed_step(step, error)
        except (OSError, RuntimeError, MemoryError) as second:
            line = f"warning: saving after this error failed: {error_line(second)}"
            if self._say is not None:
                self._say(line)
            elif not isinstance(second, OSError):  # every rank raises OSError for another's file
                show(f"rank {self.coordinator.rank}: {line}")

    def _write_failed_step(self, step: int, error: NonFiniteError) -> None:
        """Writes the batch that gave NaN or infinity, with the weights of the pass in which it did (the last checkpoint
        may be many updates older), to FAILED_STEPS/step-NNNNNN, a checkpoint without the optimizer, which no such pass
        reads. Then removes the folders of earlier failures."""
        root = self._output / FAILED_STEPS
        earlier = [folder for other, folder in checkpoint_folders(root) if other != step]
        leads = self._say is not None
        state = {"failure": {"message": str(error), "config": to_plain(self.config)}} if leads else None
        save = begin_save(self.policy, root, step, state, background=False, optimizer=False)
        # Keeps all: by number this one may be the oldest.
        save.complete(len(earlier) + 1, self.config.trainer.timeout, self._say)
        if leads:
            folder, repeat = root / f"step-{step:06d}", f"dynamo-megatron replay --step {self._output} {step}"
            error.inputs.save(folder / PASS_FILE)
            for other in earlier:
                shutil.rmtree(other, ignore_errors=True)
            self._say(f"the batch that failed and its weights: {folder}; {repeat} repeats it")

    # -- called by the loop ----------------------------------------------------------------------------------------
    def begin_step(self, step: int) -> None:
        """Begins the step's time limit and profile."""
        self.coordinator.end_step()
        self.coordinator.begin_step(step)
        self._profiler.begin(step)

    def reached(self, step: int) -> None:
        self._profiler.end(step)
        self.phases.clock.begin("save")
        super().reached(step)
        give_back_freed_memory(step)
        self.phases.clock.begin("")

    def save(self) -> None:
        self.phases.begin("save")
        super().save()

    def save_if_due(self, step: int, stop_reason: str | None) -> None:
        """Saves every `checkpoint.every` steps and after the last step; never if `checkpoint.every` is null."""
        every = self.config.checkpoint.every
        if every and (stop_reason is not None or step % every == 0 or step == self.config.trainer.steps):
            self.save()

    def on_rank_0(self, what: str, make: Callable[[], T]) -> T:
        return self.coordinator.on_rank_0(what, make, self.policy.layout)
