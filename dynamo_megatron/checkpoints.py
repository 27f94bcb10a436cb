"""When a run saves and what it resumes from. The format is `policy/checkpoint.py`'s."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from dynamo_megatron.config import Config
from dynamo_megatron.output_dir import latest_checkpoint
from dynamo_megatron.policy.checkpoint import load_checkpoint, load_state, save_checkpoint
from dynamo_megatron.policy.policy import Policy


class HasState(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Checkpoints:
    """The policy together with `parts`, rank 0's own state (plain data). `parts` and `say` are rank 0's alone.

    All methods but `reached` are collective over all ranks.
    """

    def __init__(
        self, policy: Policy, config: Config, parts: Mapping[str, HasState], say: Callable[[str], None] | None
    ):
        self._policy, self._parts = policy, parts if policy.layout.rank == 0 else None
        self._say = say
        self._root, self._config = Path(config.output_dir) / "checkpoints", config
        self._reached = self._saved = 0
        self._state: dict[str, Any] = {}

    def resume(self) -> int:
        """Loads the newest complete checkpoint, if there is one; returns its step, else 0."""
        found = latest_checkpoint(self._root)
        if found is not None:
            step, folder = found
            start = time.monotonic()
            load_checkpoint(self._policy, folder)
            if self._parts is not None:
                state = load_state(folder)
                for name, part in self._parts.items():
                    part.load_state_dict(state[name])
                self._say(f"resumed from {folder} (step {step}) in {time.monotonic() - start:.1f} s")
            self._saved = step
        self.reached(self._saved)
        return self._saved

    def reached(self, step: int) -> None:
        """The weights are those of `step` now, and so is the state of the parts."""
        self._reached = step
        if self._parts is not None:
            self._state = {name: part.state_dict() for name, part in self._parts.items()}

    def save(self, finished: str | None = None) -> int | None:
        """Saves the step reached and returns it; None where that is done already and there is nothing to add to it.

        `finished`: why the run ends here, before `trainer.steps`. Raises OSError where the disk is full.
        """
        if self._saved == self._reached and not finished:
            return None
        state = None
        if self._parts is not None:
            stop_when = self._config.trainer.stop_when
            early = {"why": finished, "stop_when": stop_when.model_dump(mode="json")} if finished else None
            state = {**self._state, "finished": early}
        save_checkpoint(self._policy, self._root, self._reached, state, self._config.checkpoint.keep_last)
        self._saved = self._reached
        return self._saved
