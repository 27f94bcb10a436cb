"""The output folder of a run: whose it is, what of it is still good, and that only one run writes there."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from dynamo_megatron.checkpoint.folder import choose_checkpoint, latest_checkpoint, read_manifest, read_state
from dynamo_megatron.checkpoint.safetensors_folder import CHAT_TEMPLATE_FILE, EXPORT_FILE, exported_step
from dynamo_megatron.config import Config
from dynamo_megatron.config.files import ConfigError, differing, identity, read_saved, to_plain
from dynamo_megatron.rollout.store import step_files
from dynamo_megatron.runtime import plain_json
from dynamo_megatron.runtime.plain_text import on_one_line
from dynamo_megatron.runtime.run_folder import ENDED_FILE, LOCK_FILE, has_results, refuse_foreign
from dynamo_megatron.runtime.whole_files import replacing
from dynamo_megatron.tracking.metrics import STEP_LOGS, kept_bytes

# Changed, these lead to other weights from the same rollouts, or to the same up to rounding.
_TRAJECTORY = (
    *("optimizer", "critic.optimizer", "parallel", "kernels"),
    *("trainer.micro_batch_tokens", "trainer.deterministic", "rollout.router_replay", "rollout.proof.max_mean_gap"),
)


class OutputDir:
    """Held by rank 0 from `claim` to the end of its process."""

    def __init__(self, config: Config):
        self.path = Path(config.output_dir)
        self.config = config  # of the command, all of it
        self._file, self._ended = self.path / "config.yaml", self.path / ENDED_FILE

    def finished(self) -> str | None:
        """Says so where the run in the folder has ended, export included, and is asked for nothing else. One whose last
        checkpoint was deleted goes on from an earlier one, if there is one. Raises ConfigError as `check`."""
        last = self.check()
        gone = self.config.checkpoint.export_hf == "final" and not (self.path / "hf").is_dir()
        if not self._ended.is_file() or gone:
            return None
        ended = plain_json.read_object(self._ended)
        deleted = last is not None and last[0] < ended.get("saved", 0)
        return f"{self.path}: {ended['said']}" if ended["asked"] == self._asked() and not deleted else None

    def end(self, step: int) -> None:
        """The run has ended after `step`."""
        said = f"already at step {step} of {self.config.trainer.steps}"
        saved = last[0] if (last := self._last()) is not None else 0
        with replacing(self._ended) as file:
            file.write(json.dumps({"said": said, "saved": saved, "asked": self._asked()}).encode())

    def _asked(self) -> dict[str, Any]:
        return identity(to_plain(self.config), ("trainer.steps", "eval", "checkpoint.export_hf"))

    def _last(self) -> tuple[int, Path] | None:
        return latest_checkpoint(self.path / "checkpoints")

    def claim(self) -> None:
        """Locks the folder for this process. Raises ConfigError: not writable, another process at work, or
        unreadable rollouts after the last checkpoint."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"output_dir: another process trains in {self.path}; end it or name another folder"
            ) from None
        except OSError as error:
            raise ConfigError(f"output_dir: {self.path}: {error.strerror}") from None
        last = self.check()
        if has_results(self.path):
            changes = self._changes([key for key in to_plain(self.config) if key != "output_dir"])
            told = ", ".join(f"{key} {_shown(now)} instead of {_shown(old)}" for key, (now, old) in changes.items())
            goes_on = "goes on" if last is not None else "has no checkpoint and begins again"
            print(f"{self.path}: the run there {goes_on}{told and f', with {told}'}", flush=True)

    def _changes(self, *keys: Sequence[str]) -> dict[str, tuple[Any, Any]]:
        """Each key of `identity` that differs from config.yaml -> its new and its old value. Raises ConfigError."""
        try:
            saved = read_saved(self._file)
        except ConfigError as error:
            raise ConfigError(f"output_dir: {error}; restore it from a copy, or name another folder") from None
        now, before = identity(to_plain(self.config), *keys), identity(saved, *keys)
        return {key: (now.get(key), before.get(key)) for key in differing(now, before)}

    def check(self) -> tuple[int, Path] | None:
        """The last checkpoint; None where there is none. Raises ConfigError where the folder holds results that are not
        this run's, files that are no run's, only damaged checkpoints, or files of this run that are broken where it
        would go on."""
        refuse_foreign(self.path)
        if not has_results(self.path):
            return None
        if self.config.trainer.resume == "never":
            raise ConfigError(f"output_dir: {self.path} holds a run; name another folder or set trainer.resume=auto")
        if not self._file.is_file():
            raise ConfigError(f"output_dir: {self.path} holds results but no config.yaml; name another folder")
        last = self._last()
        if differ := sorted(self._changes()):
            hint = "it has no checkpoint: delete it, or name another folder" if last is None else "name another folder"
            raise ConfigError(f"output_dir: {self.path} holds a run with another {', '.join(differ)}; {hint}")
        try:
            choose_checkpoint(self.path / "checkpoints", say=lambda line: None)
            for name in STEP_LOGS:
                kept_bytes(self.path / name, last[0] if last is not None else 0)
        except (ValueError, OSError) as error:
            raise ConfigError(f"output_dir: {error}") from None
        return last

    def keep_chat_template(self, text: str) -> None:
        """Writes it where exports and conversions find it."""
        with replacing(self.path / CHAT_TEMPLATE_FILE) as whole:
            whole.write(text.encode())

    def stream_state(self) -> dict[str, Any] | None:
        """Of the prompt stream, in the checkpoint that a run here goes on from; None where there is none."""
        last = self._last()
        return read_state(last[1]).get("stream") if last is not None else None

    def take_over(self, step: int, ranks: int) -> None:
        """Writes config.yaml. The run goes on after `step`: rollouts of later steps than the next one came from weights
        that other settings will not give again, and are dropped if such settings have changed, or the number of `ranks`
        since the checkpoint. With `rollout.max_staleness` they may come from weights up to `step`; the rollout process
        drops those that do not."""
        plain, ahead = to_plain(self.config), self.config.rollout.max_staleness > 0
        scheduled = any(o.schedule != "constant" for o in (self.config.optimizer, self.config.critic.optimizer))
        keys = (*_TRAJECTORY, *(["trainer.steps"] if scheduled else []))
        self._ended.unlink(missing_ok=True)
        for export in self.path.glob("hf*"):
            if (exported_step(export) or 0) > step:  # of steps that come again, and will be exported again
                (export / EXPORT_FILE).unlink()
        layout = read_manifest(last[1])["layout"] if (last := self._last()) is not None else None
        moved = layout is not None and layout["ranks"] != ranks
        if not ahead and self._file.is_file() and (moved or self._changes(keys)):
            for later, rollouts in step_files(self.path).items():
                if later > step + 1:
                    rollouts.unlink()
        with replacing(self._file) as file:
            file.write(yaml.safe_dump(plain, sort_keys=False).encode())


def _shown(value: Any) -> str:
    return on_one_line(json.dumps(value, ensure_ascii=False), 80)
