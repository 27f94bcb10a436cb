"""`dynamo-megatron convert`: a run's checkpoint as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from dynamo_megatron.checkpoint_folder import complete_checkpoints, latest_checkpoint
from dynamo_megatron.config import Config, ParallelConfig
from dynamo_megatron.config_files import ConfigError
from dynamo_megatron.coordination import Coordinator
from dynamo_megatron.models import ModelSpec
from dynamo_megatron.run import Job

if TYPE_CHECKING:
    from dynamo_megatron.policy.policy import Policy


def find_checkpoint(path: str | Path) -> tuple[int, Path]:
    """(step, folder) of the checkpoint that `path` is, or of the newest complete one of the run that it is.

    Raises ConfigError.
    """
    path = Path(path).resolve()
    if path.parent.name == "checkpoints":
        found = next((c for c in complete_checkpoints(path.parent) if c[1] == path), None)
    else:
        found = latest_checkpoint(path / "checkpoints")
    if found is None:
        raise ConfigError(f"{path}: neither a checkpoint nor a run with a complete one in its checkpoints/")
    return found


def run_config(checkpoint: Path) -> Config:
    """The config of the run that a checkpoint belongs to. Raises ConfigError."""
    file = checkpoint.parents[1] / "config.yaml"
    try:
        return Config.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
    except OSError:
        raise ConfigError(f"{file}: not found; a checkpoint stays in the folder of its run") from None
    except (yaml.YAMLError, ValidationError) as error:
        raise ConfigError(f"{file}: not the config of a run: {' '.join(str(error).split())}") from None


class ConvertJob(Job):
    """One rank that loads a checkpoint, whatever layout saved it, and writes it whole."""

    def __init__(self, step: int, checkpoint: Path, out: Path):
        config = run_config(checkpoint)
        one_rank = ParallelConfig()
        trainer = config.trainer.model_copy(update={"stop_when": None})
        super().__init__(config.model_copy(update={"parallel": one_rank, "trainer": trainer}))
        self.step, self.checkpoint, self.out = step, checkpoint, out

    def check(self, ranks: int) -> dict[str, Any]:
        if self.out.exists():
            raise ConfigError(f"{self.out}: is there already; name another folder")
        return super().check(ranks)

    def prepare(self, spec: ModelSpec) -> None:
        self.out.parent.mkdir(parents=True, exist_ok=True)

    def set_up(self, policy: Policy, coordinator: Coordinator) -> None:
        from dynamo_megatron.policy.checkpoint import load_checkpoint

        self._policy = policy
        load_checkpoint(policy, self.checkpoint, optimizer=False)

    def run(self) -> None:
        from dynamo_megatron.resharding.push import export_huggingface

        export_huggingface(self._policy, self.out, self.step)
        print(f"{self.out}: written from {self.checkpoint}", flush=True)
