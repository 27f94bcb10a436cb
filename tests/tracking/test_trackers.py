"""Each tracker gets every row, and a resumed run goes on; one that fails ends nothing."""

from __future__ import annotations

import importlib.util
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo_megatron.config import Config
from dynamo_megatron.tracking import trackers
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


def config(output: Path, *backends: str) -> Config:
    output.mkdir(exist_ok=True)
    tracking = {"backends": ["jsonl", *backends]}
    return Config(model={"path": "m"}, data={"source": "s"}, output_dir=str(output), tracking=tracking)


def track(setting: Config, start: int, steps: range, reward: float, say=pytest.fail) -> None:
    """An evaluation ends after the step that follows it, as with `rollout.max_staleness`."""
    check_trackers(setting)
    every = Trackers(setting, start, say)
    for step in steps:
        every.write({"step": step, "reward/mean": reward, "text": "x"})
        if step % 2 == 1 and step > 1:
            every.write({"step": step - 1, "eval/pass@1": reward / 2})
    every.close()
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()  # else the file of a second run is complete only when this process ends


def of_tensorboard(output: Path) -> tuple[list, list]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(output / "tensorboard"))
    events.Reload()
    return tuple([(e.step, e.value) for e in events.Scalars(name)] for name in ("reward/mean", "eval/pass@1"))


def of_wandb(output: Path) -> tuple[list, list]:
    """From the protobuf records of .wandb files: a header of 7 bytes, then LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = {"reward/mean": [], "eval/pass@1": []}
    for file in sorted(output.glob("wandb/offline-run-*/*.wandb")):
        data, at, record = file.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:  # the end of a block is padded
                at += 32768 - at % 32768
            length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
            record += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind not in (1, 4):  # neither a whole record nor the last piece of one
                continue
            read, record = Record.FromString(record), b""
            if read.HasField("run"):
                assert (read.run.run_id, read.run.display_name) == ((output / "wandb-id").read_text(), output.name)
            if read.HasField("history"):
                row = {item.key or item.nested_key[0]: item.value_json for item in read.history.item}
                for name, step in (("reward/mean", "_step"), ("eval/pass@1", "eval/step")):
                    if name in row:
                        found[name].append((int(float(row[step])), float(row[name])))
    return tuple(found.values())


def of_mlflow(output: Path) -> tuple[list, list]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{output}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("dynamo-megatron").experiment_id])
    assert (run.info.run_id, run.info.status) == ((output / "mlflow-id").read_text(), "FINISHED")
    assert run.info.run_name == output.name and run.data.params["optimizer.lr"] == "1e-06"
    names = ("reward/mean", "eval/pass_1")
    return tuple([(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)] for name in names)


READ = {"tensorboard": of_tensorboard, "wandb": of_wandb, "mlflow": of_mlflow}


@pytest.mark.parametrize("name", trackers.KINDS)
def test_every_row_arrives_and_a_resumed_run_goes_on(tmp_path, monkeypatch, name):
    pytest.importorskip(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    setting = config(tmp_path / "run", name)
    track(setting, 0, range(1, 4), 0.5)
    track(setting, 2, range(3, 6), 0.75)
    rewards, passes = READ[name](tmp_path / "run")
    repeated = [(3, 0.5)] if name != "tensorboard" else []  # the other services cannot remove points
    assert sorted(rewards) == [(1, 0.5), (2, 0.5), *repeated, (3, 0.75), (4, 0.75), (5, 0.75)]
    kept = [(2, 0.25)]
    assert sorted(passes) == [*kept, (2, 0.375), (4, 0.375)] or passes == [*kept, (2, 0.375), (4, 0.375)]


def test_a_tracker_of_the_user_s_that_fails_is_told_once_and_gets_no_more(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    said, name = [], "test_trackers:Listed"
    setting = config(tmp_path, name, "tensorboard")
    track(setting, 1, range(1, 6), 0.5, said.append)
    module = importlib.import_module("test_trackers")
    assert {str(tmp_path): [1, 1, 2]} == module.ROWS
    assert said == [f"warning: {name} failed (RuntimeError: no such service); metrics.jsonl has all metrics"]
    assert len(of_tensorboard(tmp_path)[0]) == 5  # the others go on
    with pytest.raises(ValueError, match=r"^tracking\.backends: .* has no 'Missing'$"):
        check_trackers(config(tmp_path, "test_trackers:Missing"))


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_package_that_is_missing_is_named(tmp_path, name, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    answer = rf"^tracking\.backends: {name} is not installed; pip install 'dynamo-megatron\[{name}\]'$"
    with pytest.raises(ValueError, match=answer):
        check_trackers(config(tmp_path, name))


def test_wandb_without_a_key_is_refused_before_it_asks_for_one(tmp_path):
    pytest.importorskip("wandb")
    program = (
        "from dynamo_megatron.config import Config\n"
        "from dynamo_megatron.tracking.trackers import check_trackers\n"
        f"check_trackers(Config.model_validate_json({config(tmp_path, 'wandb').model_dump_json()!r}))\n"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment = {**kept, "HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "WANDB_MODE": "online"}
    command = [sys.executable, "-P", "-c", program]
    result = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert "tracking.backends: wandb has no API key; run `wandb login` or" in result.stderr
