"""Where metrics go besides metrics.jsonl. TensorBoard and wandb are optional packages, imported where asked for."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from dynamo_megatron.config import Config
from dynamo_megatron.config.files import ConfigError, to_plain
from dynamo_megatron.runtime.whole_files import replacing


class Tracker(Protocol):
    def write(self, metrics: Mapping[str, float]) -> None:
        """One row: `step` and numbers by name. A step may have several rows, of different names."""

    def close(self) -> None: ...


class TensorBoardTracker:
    """Event files in output_dir/tensorboard; a scalar a metric."""

    def __init__(self, config: Config, start: int):
        from torch.utils.tensorboard import SummaryWriter

        # Also at start 0: a run that died before its first checkpoint has left points.
        self._writer = SummaryWriter(str(Path(config.output_dir) / "tensorboard"), purge_step=start + 1)

    def write(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if name != "step":
                self._writer.add_scalar(name, value, metrics["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A wandb run that goes on under the same id (output_dir/wandb-id) on resume.

    wandb cannot take points back: it passes over rows of steps that it has already got from before a kill. Its own
    process ends at SIGTERM, also where that is blocked as it starts; SLURM sends it to every process of a job. The run
    goes on to its save, without wandb.
    """

    def __init__(self, config: Config):
        import wandb

        output = Path(config.output_dir)
        kept_id = output / "wandb-id"
        self._run = wandb.init(
            project=config.tracking.project,
            name=config.tracking.name or output.resolve().name,
            id=kept_id.read_text(encoding="utf-8") if kept_id.is_file() else None,
            resume="allow",
            dir=output,
            config=to_plain(config),
            allow_val_change=True,
            settings=wandb.Settings(console="off"),  # it would record every rewriting of the progress line
        )
        with replacing(kept_id) as file:
            file.write(self._run.id.encode())

    def write(self, metrics: Mapping[str, float]) -> None:
        try:
            self._run.log({name: value for name, value in metrics.items() if name != "step"}, step=metrics["step"])
        except ConnectionError as error:
            print(
                f"wandb: its process has ended; step {metrics['step']} is in metrics.jsonl alone: {error}", flush=True
            )

    def close(self) -> None:
        with contextlib.suppress(ConnectionError):  # as `write` has said
            self._run.finish()


def check_trackers(config: Config) -> None:
    """Raises ConfigError where a package that `tracking.backends` needs is not installed, or wandb has no API key."""
    for name in config.tracking.backends:
        if name != "jsonl" and importlib.util.find_spec(name) is None:
            raise ConfigError(f"tracking.backends: {name} is not installed; pip install 'dynamo-megatron[{name}]'")
    if "wandb" in config.tracking.backends:
        import wandb

        # wandb.init would ask for the key at the terminal, which stops a rank: it is in the background there.
        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False, verify=False):
            raise ConfigError("tracking.backends: wandb has no API key; run `wandb login` or set WANDB_MODE=offline")


def open_trackers(config: Config, start: int) -> list[Tracker]:
    """The trackers of `tracking.backends` but jsonl, for a run that goes on after step `start` (0: a new one)."""
    trackers: list[Tracker] = []
    if "tensorboard" in config.tracking.backends:
        trackers.append(TensorBoardTracker(config, start))
    if "wandb" in config.tracking.backends:
        trackers.append(WandbTracker(config))
    return trackers
