"""Each tracker gets every row, and a resumed run goes on; one that fails ends nothing."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from dynamo_megatron.config import Config
from dynamo_megatron.tracking.trackers import Trackers, check_trackers

ROWS = {}  # output_dir -> rows that a `Listed` of that run got


class Listed:
    """A tracker of a user's."""

    def __init__(self, config, start):
        self._rows = ROWS.setdefault(config.output_dir, [])
        self._rows.append(start)

    def write(self, row):
        if row["step"] == 3:
            raise RuntimeError("no such service")
        self._rows.append(row["step"])

    def close(self):
        self._rows.append("closed")


class NotStarted(Listed):
    def __init__(self, config, start):
        raise RuntimeError("no such service")


class NotClosed(Listed):
    def write(self, row):
        pass

    def close(self):
        raise RuntimeError("no such service")


def config(output: Path, *backends: str) -> Config:
    output.mkdir(exist_ok=True)
    tracking = {"backends": ["jsonl", *backends]}
    return Config(model={"path": "m"}, data={"source": "s"}, output_dir=str(output), tracking=tracking)


def track(setting: Config, start: int, steps: range, reward: float, say=pytest.fail) -> None:
    """An evaluation ends after the step that follows it, as with `rollout.max_staleness`."""
    check_trackers(setting)
    every = Trackers(setting, start, say)
    for step in steps:
        every.write({"step": step, "reward/mean": reward, "text": "x", "moe/load": ["55"]})
        if step % 2 == 1 and step > 1:
            every.write({"step": step - 1, "eval/pass@1": reward / 2})
    every.close()


def of_tensorboard(output: Path) -> tuple[list, list]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(output / "tensorboard"))
    events.Reload()
    return tuple([(e.step, e.value) for e in events.Scalars(name)] for name in ("reward/mean", "eval/pass@1"))


def of_mlflow(output: Path) -> tuple[list, list]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{output}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("dynamo-megatron").experiment_id])
    assert (run.info.run_id, run.info.status) == ((output / "mlflow-id").read_text(), "FINISHED")
    assert run.info.run_name == output.name and run.data.params["optimizer.lr"] == "1e-06"
    names = ("reward/mean", "eval/pass_1")
    return tuple([(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)] for name in names)


@pytest.mark.parametrize(("name", "read"), [("tensorboard", of_tensorboard), ("mlflow", of_mlflow)])
def test_every_row_arrives_and_a_resumed_run_goes_on(tmp_path, monkeypatch, name, read):
    pytest.importorskip(name)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    setting = config(tmp_path / "run", name)
    track(setting, 0, range(1, 4), 0.5)
    track(setting, 2, range(3, 6), 0.75)
    rewards, passes = read(tmp_path / "run")
    repeated = [(3, 0.5)] if name == "mlflow" else []  # it cannot remove points
    assert sorted(rewards) == [(1, 0.5), (2, 0.5), *repeated, (3, 0.75), (4, 0.75), (5, 0.75)]
    assert sorted(passes) == [(2, 0.25), (2, 0.375), (4, 0.375)]


def test_a_tracker_of_the_user_s_that_fails_is_told_once_and_gets_no_more(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    said, name = [], "test_trackers:Listed"
    setting = config(tmp_path, name, "tensorboard")
    track(setting, 1, range(1, 6), 0.5, said.append)
    module = importlib.import_module("test_trackers")
    assert {str(tmp_path): [1, 1, 2]} == module.ROWS
    assert said == [f"warning: {name} failed (RuntimeError: no such service); metrics.jsonl has all metrics"]
    assert len(of_tensorboard(tmp_path)[0]) == 5  # the others go on
    for name in ("test_trackers:NotStarted", "test_trackers:NotClosed"):
        said.clear()
        track(config(tmp_path, name), 0, range(1, 6), 0.5, said.append)
        assert said == [f"warning: {name} failed (RuntimeError: no such service); metrics.jsonl has all metrics"]
    with pytest.raises(ValueError, match=r"^tracking\.backends: .* has no 'Missing'$"):
        check_trackers(config(tmp_path, "test_trackers:Missing"))


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_package_that_is_missing_is_named(tmp_path, name, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    answer = rf"^tracking\.backends: {name} is not installed; pip install 'dynamo-megatron\[{name}\]'$"
    with pytest.raises(ValueError, match=answer):
        check_trackers(config(tmp_path, name))
