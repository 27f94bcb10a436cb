"""The trackers that send metrics to a service. Each runs in a process of its own (tracker_process.py), so exceptions
are not caught here: they end only that process.

A resumed run continues each tracker's run, whose id is in output_dir/NAME-id. No tracker can remove points: those of
steps after the checkpoint, which the run repeats, stay there.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dynamo_megatron.config import Config
from dynamo_megatron.config.files import to_plain
from dynamo_megatron.runtime.listening import serve_openmetrics
from dynamo_megatron.runtime.whole_files import replacing

LONGEST_PARAM = 500  # characters of a configuration value; the limit of mlflow's file store


def run_name(config: Config) -> str:
    return config.tracking.name or Path(config.output_dir).resolve().name


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a row, without its step."""
    return {name: float(v) for name, v in metrics.items() if name != "step" and isinstance(v, int | float)}


class KeptId:
    """The id of a service's run, in a file of the run's folder."""

    def __init__(self, config: Config, service: str):
        self._file = Path(config.output_dir) / f"{service}-id"

    def read(self) -> str | None:
        return self._file.read_text(encoding="utf-8") if self._file.is_file() else None

    def keep(self, run: str) -> None:
        with replacing(self._file) as file:
            file.write(run.encode())


class WandbTracker:
    """A wandb run. wandb ignores rows of earlier steps than the last one that it received, so the rows of steps that a
    run repeats after a kill. Rows of evaluations have no step of wandb's, since an evaluation may end after later steps
    (`rollout.max_staleness`); `eval/step` is their step."""

    def __init__(self, config: Config):
        import wandb

        kept = KeptId(config, "wandb")
        self._run = wandb.init(
            project=config.tracking.project,
            name=run_name(config),
            id=kept.read(),
            resume="allow",
            dir=config.output_dir,
            config=to_plain(config),
            allow_val_change=True,
            settings=wandb.Settings(console="off"),
        )
        self._run.define_metric("eval/*", step_metric="eval/step")
        kept.keep(self._run.id)

    def write(self, metrics: Mapping[str, float]) -> None:
        row = numbers(metrics)
        if any(name.startswith("eval/") for name in row):
            self._run.log(row | {"eval/step": metrics["step"]})
        else:
            self._run.log(row, step=metrics["step"])

    def close(self) -> None:
        self._run.finish()


class MlflowTracker:
    """A run of the experiment `tracking.project`, at MLFLOW_TRACKING_URI (default: the database output_dir/mlflow.db).
    Its parameters are the configuration at the first start."""

    def __init__(self, config: Config):
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        default = f"sqlite:///{Path(config.output_dir).resolve() / 'mlflow.db'}"
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", default))
        kept = KeptId(config, "mlflow")
        self._id = kept.read()
        if self._id is not None:
            self._client.update_run(self._id, status="RUNNING")
            return
        project = config.tracking.project
        experiment = self._client.get_experiment_by_name(project)
        number = experiment.experiment_id if experiment is not None else self._client.create_experiment(project)
        self._id = self._client.create_run(number, run_name=run_name(config)).info.run_id
        kept.keep(self._id)
        params = [Param(key, str(value)[:LONGEST_PARAM]) for key, value in flat(to_plain(config)).items()]
        for first in range(0, len(params), 100):  # mlflow's limit per request
            self._client.log_batch(self._id, params=params[first : first + 100])

    def write(self, metrics: Mapping[str, float]) -> None:
        now, step = round(1000 * time.time()), metrics["step"]
        row = [self._metric(mlflow_name(name), value, now, step) for name, value in numbers(metrics).items()]
        self._client.log_batch(self._id, metrics=row)

    def close(self) -> None:
        self._client.set_terminated(self._id)


def mlflow_name(name: str) -> str:
    """`eval/pass@1` -> `eval/pass_1`: mlflow allows only letters, digits and _-. :/ in names."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def flat(section: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """The nested mapping `section` as dotted key -> value; `at` is a prefix of the keys."""
    found: dict[str, Any] = {}
    for name, value in section.items():
        found |= flat(value, f"{at}{name}.") if isinstance(value, Mapping) else {f"{at}{name}": value}
    return found


class SwanlabTracker:
    """A swanlab run. SWANLAB_MODE chooses where: online (the default), offline or local. Its files are in
    output_dir/swanlab."""

    def __init__(self, config: Config):
        import swanlab

        kept = KeptId(config, "swanlab")
        folder = Path(config.output_dir) / "swanlab"
        folder.mkdir(exist_ok=True)
        self._run = swanlab.init(
            project=config.tracking.project,
            name=run_name(config),
            id=kept.read(),
            resume="allow",
            config=to_plain(config),
            log_dir=str(folder),
        )
        kept.keep(self._run.id)

    def write(self, metrics: Mapping[str, float]) -> None:
        self._run.log(numbers(metrics), step=metrics["step"])

    def close(self) -> None:
        self._run.finish()


class TrackioTracker:
    """A trackio run, in the database of TRACKIO_DIR on this machine, or in the space of TRACKIO_SPACE_ID. trackio
    identifies a run by its name, so four random hexadecimal digits make the name unique."""

    def __init__(self, config: Config):
        import trackio

        kept = KeptId(config, "trackio")
        self._run = trackio.init(
            project=config.tracking.project,
            name=kept.read() or f"{run_name(config)}-{secrets.token_hex(2)}",
            resume="allow",
            config=flat(to_plain(config)),
            embed=False,
            auto_log_gpu=False,  # metrics.jsonl has the ranks' resources
            auto_log_cpu=False,
        )
        kept.keep(self._run.name)

    def write(self, metrics: Mapping[str, float]) -> None:
        self._run.log(numbers(metrics), step=metrics["step"])

    def close(self) -> None:
        self._run.finish()


class OpenMetricsEndpoint:
    """Serves http://127.0.0.1:PORT/metrics with the last value of each metric, `policy/grad_norm` as
    `dynamo_megatron_policy_grad_norm`, and with `dynamo_megatron_step`. Metrics whose converted names are equal share
    one gauge."""

    def __init__(self, config: Config):
        from prometheus_client import CollectorRegistry, Gauge

        self._gauge, self._registry = Gauge, CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        self._close = serve_openmetrics(config.tracking.openmetrics, self._registry)

    def write(self, metrics: Mapping[str, float]) -> None:
        for name, value in {**numbers(metrics), "step": metrics["step"]}.items():
            metric = "dynamo_megatron_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
            if metric not in self._gauges:
                self._gauges[metric] = self._gauge(metric, name, registry=self._registry)
            self._gauges[metric].set(value)

    def close(self) -> None:
        self._close()


SERVICES: dict[str, Callable[[Config], Any]] = {
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "swanlab": SwanlabTracker,
    "trackio": TrackioTracker,
    "openmetrics": OpenMetricsEndpoint,
}
