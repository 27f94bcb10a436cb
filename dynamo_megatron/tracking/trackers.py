"""The trackers that get the metrics besides metrics.jsonl. Their packages are optional, and imported when needed."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from dynamo_megatron.config import Config
from dynamo_megatron.config.files import ConfigError
from dynamo_megatron.errors import InputError
from dynamo_megatron.runtime.listening import LOOPBACK, check_port
from dynamo_megatron.tracking.tracker_process import TrackerProcess

POLL_EVERY = 0.05  # seconds
PACKAGES = {"openmetrics": "prometheus_client"}  # tracker -> package, where the names differ


class Tracker(Protocol):
    def write(self, metrics: Mapping[str, float]) -> None:
        """Takes one row: `step` and numbers by name. A step may have several rows with different names."""

    def ended(self) -> bool:
        """Sends the last rows as far as possible without waiting; no row may be written after this call. Returns True
        once everything is sent and the tracker is closed."""

    def close(self) -> None:
        """Closes the tracker, even where `ended` has not returned True yet."""


class TensorBoardTracker:
    """Writes event files in output_dir/tensorboard, one scalar per metric. Warns once where they cannot be written."""

    def __init__(self, config: Config, start: int, say: Callable[[str], None]):
        from torch.utils.tensorboard import SummaryWriter

        # Also at start 0: a run that died before its first checkpoint may have left points.
        self._writer = SummaryWriter(str(Path(config.output_dir) / "tensorboard"), purge_step=start + 1)
        self._say, self._failed = say, False

    def write(self, metrics: Mapping[str, float]) -> None:
        self._attempt(lambda: self._add(metrics))

    def ended(self) -> bool:
        return True

    def close(self) -> None:
        self._attempt(self._writer.close)

    def _add(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if name != "step":
                self._writer.add_scalar(name, value, metrics["step"])
        self._writer.flush()

    def _attempt(self, call: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            call()
        except OSError as error:
            self._failed = True
            self._say(f"warning: tensorboard failed ({error}); metrics.jsonl has all metrics")


def asked_for(config: Config) -> list[str]:
    """The names of the run's trackers, without jsonl."""
    tracking = config.tracking
    return [*(b for b in tracking.backends if b != "jsonl"), *(["openmetrics"] if tracking.openmetrics else [])]


def check_trackers(config: Config) -> None:
    """Raises ConfigError where a package that a tracker needs is not installed, wandb has no API key, or the port of
    `tracking.openmetrics` cannot be listened to here."""
    for name in asked_for(config):
        key = "tracking.openmetrics" if name == "openmetrics" else "tracking.backends"
        if importlib.util.find_spec(package := PACKAGES.get(name, name)) is None:
            raise ConfigError(f"{key}: {package} is not installed; pip install 'dynamo-megatron[{name}]'")
    if (port := config.tracking.openmetrics) is not None:
        try:
            check_port(LOOPBACK, port, "tracking.openmetrics: {}; name another one")
        except InputError as error:
            raise ConfigError(str(error)) from None
    if "wandb" in config.tracking.backends:
        import wandb

        # wandb.init would ask for the key at the terminal, which suspends a rank, since it is a background process.
        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False, verify=False):
            raise ConfigError("tracking.backends: wandb has no API key; run `wandb login` or set WANDB_MODE=offline")


def open_trackers(config: Config, start: int, say: Callable[[str], None]) -> list[Tracker]:
    """The trackers of a run that continues after step `start` (0: a new run). TensorBoard's only writes files and runs
    in this process. The others send metrics to services, and each has a process of its own. `say` gets a line for the
    user where a tracker fails."""
    return [
        TensorBoardTracker(config, start, say) if name == "tensorboard" else TrackerProcess(name, config, say)
        for name in asked_for(config)
    ]


def close_trackers(trackers: Sequence[Tracker], within: float) -> None:
    """Waits at most `within` seconds in total until all trackers have sent their last rows, then closes them."""
    deadline, waiting = time.monotonic() + within, list(trackers)
    while (waiting := [tracker for tracker in waiting if not tracker.ended()]) and time.monotonic() < deadline:
        time.sleep(POLL_EVERY)
    for tracker in trackers:
        tracker.close()
