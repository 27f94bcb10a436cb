"""When a run saves and exports, and what it resumes from."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dynamo_megatron.checkpoint.folder import choose_checkpoint, read_state
from dynamo_megatron.checkpoint.policy_state import Save, begin_save, load_checkpoint
from dynamo_megatron.checkpoint.safetensors_folder import every_export, exported_step
from dynamo_megatron.config import Config
from dynamo_megatron.errors import InputError
from dynamo_megatron.policy.policy import Policy
from dynamo_megatron.policy.spikes import SPIKES
from dynamo_megatron.weight_sync.folder import export_huggingface


class Checkpoints:
    """Saves, loads and exports the policy, with the state of `parts`: their state_dict, of plain data and arrays that
    are not modified later, goes to load_state_dict. Only rank 0 uses `parts` and `say`, which prints a line for the
    user. `critic`: saved and loaded with the policy; None: there is none.

    All methods are collective over all ranks. Those that save raise OSError if the disk is full. With
    `checkpoint.async` a later call than the one that began the save may raise it.
    """

    def __init__(
        self,
        policy: Policy,
        config: Config,
        parts: Mapping[str, Any],
        say: Callable[[str], None] | None,
        critic: Policy | None = None,
    ):
        self.config, self.policy, self._say, self._critic = config, policy, say, critic
        self._parts = parts if policy.layout.rank == 0 else None
        self._output = Path(config.output_dir)
        self._reached = self._saved = 0
        self._state: dict[str, Any] | None = None
        self._under_way: Save | None = None

    def resume(self) -> int:
        """Loads the newest complete checkpoint and returns its step, or returns 0 if there is no checkpoint. Raises
        ValueError if all checkpoints are damaged."""
        leads = self._parts is not None
        chosen = choose_checkpoint(self._output / "checkpoints", self._say) if leads else None
        if (found := self.policy.layout.gather(chosen)[0]) is not None:
            self._saved, folder = found
            start = time.monotonic()
            load_checkpoint(self.policy, folder, critic=self._critic)
            state = read_state(folder) if leads else {}
            for name, part in (self._parts or {}).items():
                if name in state:
                    part.load_state_dict(state[name])
                elif name != SPIKES:  # the option was off before; its history begins here
                    raise InputError(f"{folder}: its state has no {name}: it is of another command, or altered")
            if leads:
                self._say(f"resumed from {folder} (step {self._saved}) in {time.monotonic() - start:.1f} s")
        self.reached(self._saved)
        return self._saved

    def reached(self, step: int) -> None:
        """To be called when the weights and the parts have the state of `step`. Completes a background save whose files
        have all been written."""
        self._reached = step
        if self._parts is not None:
            self._state = {name: part.state_dict() for name, part in self._parts.items()}
        if self._under_way is not None and all(self.policy.layout.gather(self._under_way.written())):
            self.settle()

    def save(self) -> None:
        """Saves the step reached unless it is saved already; with `checkpoint.async` it only begins the save."""
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

    def settle(self) -> None:
        """Waits until the save under way, if there is one, is complete."""
        if self._under_way is not None:
            self._under_way.complete(self.config.checkpoint.keep_last, self.config.trainer.timeout, self._say)
            self._under_way = None

    def export_best(self) -> None:
        """To be called when the step reached is the best so far. It is saved first, so that no step is lost if the
        export fails."""
        if self.config.checkpoint.export_hf == "best":
            self.save()
            self._export(self._output / "hf")

    def export_final(self) -> None:
        """To be called at the end of the run. Completes the save under way, and exports the model if requested."""
        self.settle()
        if self.config.checkpoint.export_hf == "final":
            self._export(self._output / "hf")

    def _export(self, folder: Path) -> None:
        exported = self.policy.layout.gather(exported_step(folder) == self._reached)
        if not exported[0]:  # rank 0 decides: the others may see the shared folder late
            self.settle()  # else a kill could leave an export of a step that the resumed run repeats
            export_huggingface(self.policy, folder, self._reached)
