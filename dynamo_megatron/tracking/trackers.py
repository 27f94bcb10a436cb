"""The trackers that get the metrics besides metrics.jsonl. Their packages are optional, and imported when needed.

A resumed run continues each tracker's run, whose id is in output_dir/NAME-id. wandb and mlflow cannot remove points:
those of steps after the checkpoint, which the run repeats, stay there.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dynamo_megatron.config import Config
from dynamo_megatron.config.files import ConfigError, identity
from dynamo_megatron.runtime.user_code import load_callable
from dynamo_megatron.runtime.whole_files import replacing

LONGEST_PARAM = 500  # characters of a configuration value; the limit of mlflow's file store
Row = Mapping[str, Any]  # `step` and metrics by name


class TensorBoardTracker:
    """Writes event files in output_dir/tensorboard, one scalar per metric."""

    def __init__(self, config: Config, start: int):
        from torch.utils.tensorboard import SummaryWriter

        # Also at start 0: a run that died before its first checkpoint may have left points.
        self._writer = SummaryWriter(str(Path(config.output_dir) / "tensorboard"), purge_step=start + 1)
        self.close = self._writer.close

    def write(self, row: Row) -> None:
        for name, value in numbers(row).items():
            self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()


class WandbTracker:
    """A wandb run. wandb ignores rows of earlier steps than the last one that it received, so the rows of steps that a
    run repeats after a kill. Rows of evaluations have no step of wandb's and end none, since an evaluation may end
    after later steps (`rollout.max_staleness`); `eval/step` is their step."""

    def __init__(self, config: Config, start: int):
        import wandb

        self._run = wandb.init(
            project=config.tracking.project,
            name=run_name(config),
            id=kept_id(config, "wandb"),
            resume="allow",
            dir=config.output_dir,
            config=config.model_dump(mode="json"),
            allow_val_change=True,
            settings=wandb.Settings(console="off", quiet=True),
        )
        self._run.define_metric("eval/*", step_metric="eval/step")
        keep_id(config, "wandb", self._run.id)
        self.close = self._run.finish

    def write(self, row: Row) -> None:
        values = numbers(row)
        if any(name.startswith("eval/") for name in values):
            self._run.log(values | {"eval/step": row["step"]}, commit=False)
        else:
            self._run.log(values, step=row["step"])


class MlflowTracker:
    """A run of the experiment `tracking.project`, at MLFLOW_TRACKING_URI (default: the database output_dir/mlflow.db).
    Its parameters are the configuration at the first start. Rows are sent by mlflow's own thread."""

    def __init__(self, config: Config, start: int):
        import mlflow

        self._mlflow, self._sent = mlflow, []
        if "MLFLOW_TRACKING_URI" not in os.environ:
            mlflow.set_tracking_uri(f"sqlite:///{Path(config.output_dir).resolve() / 'mlflow.db'}")
        mlflow.set_experiment(config.tracking.project)
        if (known := kept_id(config, "mlflow")) is not None:
            mlflow.start_run(known)
            return
        keep_id(config, "mlflow", mlflow.start_run(run_name=run_name(config)).info.run_id)
        plain = config.model_dump(mode="json")
        mlflow.log_params({key: str(value)[:LONGEST_PARAM] for key, value in identity(plain, list(plain)).items()})

    def write(self, row: Row) -> None:
        # mlflow allows only letters, digits and _-. :/ in names: eval/pass@1 becomes eval/pass_1
        metrics = {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in numbers(row).items()}
        self._sent.append(self._mlflow.log_metrics(metrics, row["step"], synchronous=False))

    def close(self) -> None:
        try:
            for sent in self._sent:
                sent.wait()
        finally:
            self._mlflow.end_run()


KINDS = {"tensorboard": TensorBoardTracker, "wandb": WandbTracker, "mlflow": MlflowTracker}


def run_name(config: Config) -> str:
    return config.tracking.name or Path(config.output_dir).resolve().name


def numbers(row: Row) -> dict[str, float]:
    """The metrics of a row, without its step."""
    return {name: float(v) for name, v in row.items() if name != "step" and isinstance(v, int | float)}


def kept_id(config: Config, service: str) -> str | None:
    file = Path(config.output_dir) / f"{service}-id"
    return file.read_text(encoding="utf-8") if file.is_file() else None


def keep_id(config: Config, service: str, run: str) -> None:
    with replacing(Path(config.output_dir) / f"{service}-id") as file:
        file.write(run.encode())


def check_trackers(config: Config) -> None:
    """Raises InputError where a tracker's package is not installed, its class is not there, or wandb has no API
    key."""
    for name in config.tracking.backends:
        if ":" in name:
            load_callable(name, "tracking.backends")
        elif name in KINDS and importlib.util.find_spec(name) is None:
            raise ConfigError(f"tracking.backends: {name} is not installed; pip install 'dynamo-megatron[{name}]'")
    if "wandb" in config.tracking.backends:
        import wandb

        # wandb.init would ask for the key at the terminal, which suspends a rank, since it is a background process.
        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False, verify=False):
            raise ConfigError("tracking.backends: wandb has no API key; run `wandb login` or set WANDB_MODE=offline")


class Trackers:
    """The trackers of a run that continues after step `start` (0: a new run).

    Each, also `module:Class` of the user's, is called with the configuration and `start`, and gives an object with
    `write(row)`, which the run waits for and a step may call several times with different names, and `close()`, which
    sends what is left. One that raises gets no more rows, with one line to `say`; the run goes on.
    """

    def __init__(self, config: Config, start: int, say: Callable[[str], None]):
        self._say, self._open = say, {}
        for name in config.tracking.backends:
            if name != "jsonl":
                with self._warning(name):
                    make = KINDS.get(name) or load_callable(name, "tracking.backends")
                    self._open[name] = make(config, start)

    def write(self, row: Row) -> None:
        for name, tracker in list(self._open.items()):
            with self._warning(name):
                tracker.write(row)

    def close(self) -> None:
        for name, tracker in list(self._open.items()):
            with self._warning(name):
                tracker.close()

    @contextmanager
    def _warning(self, name: str) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:  # a library may raise anything
            self._open.pop(name, None)
            self._say(f"warning: {name} failed ({type(error).__name__}: {error}); metrics.jsonl has all metrics")
