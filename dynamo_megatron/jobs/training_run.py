"""What `train`, `sft` and `dpo` do around their loops: they resume, save and export, stop on request, and keep a failed
step."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from dynamo_megatron.checkpoint.folder import checkpoint_folders, choose_checkpoint, read_state
from dynamo_megatron.checkpoint.policy_state import Save, begin_save, load_checkpoint
from dynamo_megatron.checkpoint.safetensors_folder import every_export, exported_step
from dynamo_megatron.config.files import to_plain
from dynamo_megatron.errors import InputError
from dynamo_megatron.jobs.run import Job
from dynamo_megatron.policy.non_finite import NonFiniteError
from dynamo_megatron.policy.policy import Policy
from dynamo_megatron.runtime.coordination import Coordinator, StopRequested
from dynamo_megatron.runtime.plain_text import error_line, show
from dynamo_megatron.runtime.process_signals import give_back_freed_memory
from dynamo_megatron.runtime.run_folder import FAILED_STEPS, PASS_FILE
from dynamo_megatron.tracking.phases import Phases
from dynamo_megatron.tracking.resources import StepProfiler
from dynamo_megatron.weight_sync.folder import export_huggingface
from dynamo_megatron.weight_sync.memory import DeviceMemory

T = TypeVar("T")


class TrainingRun:
    """One rank of a training run. `start`: the last step that is done. All methods are collective over all ranks. Those
    that save raise OSError if the disk is full; with `checkpoint.async` a later call than the one that began the save
    may raise it."""

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
        """Loads the last checkpoint, and writes the output folder's config.yaml. `state`: rank 0's, what is saved and
        loaded with policy and critic: each part's state_dict, of plain data and arrays that are not modified later,
        goes to its load_state_dict. `memory`: None where servers have memory of their own; `free_memory` ends servers
        that hold device memory which a save needs. Raises ValueError if all checkpoints are damaged."""
        self.config, self.policy, self.coordinator, self._critic = job.config, policy, coordinator, critic
        self._journal, self._folder, self._free_memory = job.journal, job.output, free_memory
        leads = job.journal is not None
        self._say = job.journal.say if leads else None
        self._parts = state if leads else None
        self._output = Path(job.config.output_dir)
        self._reached = self._saved = 0
        self._state: dict[str, Any] | None = None
        self._under_way: Save | None = None
        self.phases = Phases(job.journal.progress if leads else None, memory)
        self._profiler = StepProfiler(job.config, policy.layout)
        self.start = self._resume()
        if leads:
            job.output.take_over(self.start, policy.layout.world_size)

    def _resume(self) -> int:
        """Loads the newest complete checkpoint and returns its step, or returns 0 if there is no checkpoint."""
        leads = self._parts is not None
        chosen = choose_checkpoint(self._output / "checkpoints", self._say) if leads else None
        if (found := self.policy.layout.gather(chosen)[0]) is not None:
            self._saved, folder = found
            start = time.monotonic()
            load_checkpoint(self.policy, folder, critic=self._critic)
            state = read_state(folder) if leads else {}
            for name, part in (self._parts or {}).items():
                if name not in state:
                    raise InputError(f"{folder}: its state has no {name}: it is of another command, or altered")
                part.load_state_dict(state[name])
            if leads:
                self._say(f"resumed from {folder} (step {self._saved}) in {time.monotonic() - start:.1f} s")
        self._keep_state(self._saved)
        return self._saved

    def _keep_state(self, step: int) -> None:
        self._reached = step
        if self._parts is not None:
            self._state = {name: part.state_dict() for name, part in self._parts.items()}

    def carry_out(self, train: Callable[[], None]) -> None:
        """Trains, saves and exports. Raises StopRequested, after saving, if a stop is requested."""
        if self._journal is not None:
            self._journal.open(self.start)
        try:
            with closing(self._profiler):
                train()
        except StopRequested:
            self.coordinator.begin_step(self.coordinator.step)  # the save may take as long as a step
            self._free_memory()
            self.save()
            self.settle()
            raise
        except NonFiniteError as error:  # on every rank
            self._keep(error)
            raise
        self.coordinator.end_step()
        self.coordinator.begin_step(max(self.start, self.coordinator.step))  # the export may take as long as a step
        self.phases.begin("export")
        self.settle()
        if self.config.checkpoint.export_hf == "final":
            self._export(self._output / "hf")
        self.coordinator.end_step()
        if self._journal is not None:
            self._journal.ended(self.coordinator.step)
            self._folder.end(self.coordinator.step)

    def _keep(self, error: NonFiniteError) -> None:
        """Completes a save under way, and writes the batch of a pass that gave NaN or infinity. If this fails, the user
        gets a warning: `error` ends the run and must be the last message."""
        step = self.coordinator.step
        self.coordinator.begin_step(step)  # the files may take as long as a step
        if self._say is not None:
            self._say(f"step {step}: {error_line(error)}")
        try:
            self.settle()
            if error.inputs is not None:
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
        failure = {"failure": {"message": str(error), "config": to_plain(self._folder.config)}}
        state = failure if self._say is not None else None
        save = begin_save(self.policy, root, step, state, background=False, optimizer=False)
        # Keeps all: by number this one may be the oldest.
        save.complete(len(earlier) + 1, self.config.trainer.timeout, self._say)

        def add_batch() -> None:
            folder, repeat = root / f"step-{step:06d}", f"dynamo-megatron replay --step {self._output} {step}"
            error.inputs.save(folder / PASS_FILE)
            for other in earlier:
                shutil.rmtree(other, ignore_errors=True)
            self._say(f"the batch that failed and its weights: {folder}; {repeat} repeats it")

        self.on_rank_0("the batch that failed", add_batch)  # the first rank to end ends all

    # -- called by the loop ----------------------------------------------------------------------------------------
    def begin_step(self, step: int) -> None:
        """Begins the step's time limit and profile."""
        self.coordinator.end_step()
        self.coordinator.begin_step(step)
        self._profiler.begin(step)

    def reached(self, step: int) -> None:
        """To be called when the weights and the parts have the state of `step`. Completes a background save whose files
        have all been written."""
        self._profiler.end(step)
        self.phases.clock.begin("save")
        self._keep_state(step)
        if self._under_way is not None and all(self.policy.layout.gather(self._under_way.written())):
            self.settle()
        give_back_freed_memory(step)
        self.phases.clock.begin("")

    def save(self) -> None:
        """Saves the step reached unless it is saved already; with `checkpoint.async` it only begins the save."""
        self.phases.begin("save")
        options = self.config.checkpoint
        if self._saved != self._reached:
            self.settle()
            root = self._output / "checkpoints"
            how = {"background": options.async_save, "critic": self._critic}
            self._under_way = begin_save(self.policy, root, self._reached, self._state, **how)
            self._saved = self._reached
            if not options.async_save:
                self.settle()
        if options.export_hf == "every" and self._saved:
            self._export(every_export(self._output, self._saved))

    def save_if_due(self, step: int) -> None:
        """Saves every `checkpoint.every` steps and after the last step; never if `checkpoint.every` is null."""
        every = self.config.checkpoint.every
        if every and (step % every == 0 or step == self.config.trainer.steps):
            self.save()

    def settle(self) -> None:
        """Waits until the save under way, if there is one, is complete."""
        if self._under_way is not None:
            self._under_way.complete(self.config.checkpoint.keep_last, self.config.trainer.timeout, self._say)
            self._under_way = None

    def export_best(self) -> None:
        """To be called when the step reached is better than the one exported. It is saved first: no step is lost if the
        export fails."""
        if self.config.checkpoint.export_hf == "best":
            self.save()
            self._export(self._output / "hf")

    def _export(self, folder: Path) -> None:
        exported = self.policy.layout.gather(exported_step(folder) == self._reached)
        if not exported[0]:  # rank 0 decides: the others may see the shared folder late
            self.settle()  # else a kill could leave an export of a step that the resumed run repeats
            export_huggingface(self.policy, folder, self._reached)

    def on_rank_0(self, what: str, make: Callable[[], T]) -> T:
        return self.coordinator.on_rank_0(what, make, self.policy.layout)
