from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import struct
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from dynamo_megatron.config import Config, TrackingConfig
from dynamo_megatron.runtime.free_ports import free_port
from dynamo_megatron.tracking.trackers import check_trackers, close_trackers, open_trackers


def config(output: Path, *backends: str) -> Config:
    return Config(
        model={"path": "m"}, data={"source": "s"}, output_dir=str(output), tracking={"backends": ["jsonl", *backends]}
    )


def track(setting: Config, start: int, steps: range, reward: float) -> None:
    trackers = open_trackers(setting, start, fail)
    for tracker in trackers:
        for step in steps:
            tracker.write({"step": step, "reward/mean": reward, "policy/tokens": 10 * step})
            if step % 2 == 0:
                tracker.write({"step": step, "eval/pass@1": reward / 2})
    close_trackers(trackers, 60)


def fail(line: str) -> None:
    raise AssertionError(line)


def scalars(output: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(output / "tensorboard"))
    events.Reload()
    return [(e.step, e.value) for e in events.Scalars(name)]


def test_jsonl_alone_needs_no_tracker(tmp_path):
    assert open_trackers(config(tmp_path), 0, fail) == [] and list(tmp_path.iterdir()) == []


def test_tensorboard_gets_every_metric(tmp_path):
    setting = config(tmp_path, "tensorboard")
    check_trackers(setting)
    track(setting, 0, range(1, 4), 0.5)
    assert scalars(tmp_path, "reward/mean") == [(1, 0.5), (2, 0.5), (3, 0.5)]
    assert scalars(tmp_path, "policy/tokens") == [(1, 10.0), (2, 20.0), (3, 30.0)]
    assert scalars(tmp_path, "eval/pass@1") == [(2, 0.25)]


@pytest.mark.parametrize("start", [0, 2])
def test_a_resumed_run_s_points_take_the_place_of_those_past_the_checkpoint(tmp_path, start):
    setting = config(tmp_path, "tensorboard")
    track(setting, 0, range(1, 6), 0.5)
    track(setting, start, range(start + 1, 5), 0.75)
    assert scalars(tmp_path, "reward/mean") == [(s, 0.5 if s <= start else 0.75) for s in range(1, 5)]


def test_points_are_on_disk_before_the_run_ends(tmp_path):
    (tracker,) = open_trackers(config(tmp_path, "tensorboard"), 0, fail)
    tracker.write({"step": 1, "reward/mean": 0.5})
    assert scalars(tmp_path, "reward/mean") == [(1, 0.5)]
    tracker.close()


def test_a_disk_that_is_full_is_told_once_and_ends_nothing(small_disk):
    said: list[str] = []
    (tracker,) = open_trackers(config(small_disk, "tensorboard"), 0, said.append)
    row = {f"metric/{number}": 0.5 for number in range(2000)}
    for step in range(1, 40):  # more than a MiB
        tracker.write({"step": step, **row})
    tracker.close()
    (line,) = said
    assert line.startswith("warning: tensorboard failed (") and "No space left on device" in line


def wandb_records(file: Path) -> list:
    """The protobuf records of a .wandb file: a header of 7 bytes, then LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, records, record = file.read_bytes(), 7, [], b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # the end of a block is padded
            at += 32768 - at % 32768
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            records.append(Record.FromString(record))
            record = b""
    return records


def test_a_resumed_wandb_run_goes_on_under_its_id(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    setting = config(tmp_path / "first-run", "wandb")
    (tmp_path / "first-run").mkdir()
    check_trackers(setting)
    track(setting, 0, range(1, 4), 0.5)
    track(setting, 2, range(3, 5), 0.75)
    seen = []
    for file in sorted(tmp_path.glob("first-run/wandb/offline-run-*/*.wandb")):
        records = wandb_records(file)
        (run,) = [r.run for r in records if r.HasField("run")][:1]
        assert (run.run_id, run.project, run.display_name) == (
            (tmp_path / "first-run" / "wandb-id").read_text(),
            "dynamo-megatron",
            "first-run",
        )
        for history in (r.history for r in records if r.HasField("history")):
            row = {item.key or item.nested_key[0]: item.value_json for item in history.item}
            seen.append((int(row["_step"]), row["reward/mean"], row.get("eval/pass@1")))
    assert seen == [(1, "0.5", None), (2, "0.5", "0.25"), (3, "0.5", None), (3, "0.75", None), (4, "0.75", "0.375")]


def test_wandb_gets_an_evaluation_that_ends_after_a_later_step(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    setting = config(tmp_path / "ahead", "wandb")
    (tmp_path / "ahead").mkdir()
    trackers = open_trackers(setting, 0, fail)
    for row in ({"step": 2}, {"step": 3}, {"step": 4}):
        trackers[0].write({**row, "reward/mean": 0.5})
        if row["step"] > 2:
            trackers[0].write({"step": row["step"] - 1, "eval/pass@1": row["step"] / 10})
    close_trackers(trackers, 60)
    (file,) = tmp_path.glob("ahead/wandb/offline-run-*/*.wandb")
    seen = {}
    for history in (r.history for r in wandb_records(file) if r.HasField("history")):
        row = {item.key or item.nested_key[0]: item.value_json for item in history.item}
        if "eval/pass@1" in row:
            seen[row["eval/step"]] = row["eval/pass@1"]
    assert seen == {"2": "0.3", "3": "0.4"}


def test_wandb_without_a_key_is_refused_before_it_asks_for_one(tmp_path):
    pytest.importorskip("wandb")
    program = (
        "from dynamo_megatron.config import Config\n"
        "from dynamo_megatron.tracking.trackers import check_trackers\n"
        f"check_trackers(Config.model_validate_json({config(tmp_path, 'wandb').model_dump_json()!r}))\n"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    command = [sys.executable, "-P", "-c", program]
    for mode, answer in (("online", "tracking.backends: wandb has no API key; run `wandb login` or"), ("offline", "")):
        environment = {**kept, "HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "WANDB_MODE": mode}
        result = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert answer in result.stderr and (result.returncode == 1) == bool(answer)


@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab", "trackio"])
def test_a_package_that_is_missing_is_named(tmp_path, name):
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed")
    answer = rf"^tracking\.backends: {name} is not installed; pip install 'dynamo-megatron\[{name}\]'$"
    with pytest.raises(ValueError, match=answer):
        check_trackers(config(tmp_path, name))


def test_the_package_of_the_endpoint_is_named_where_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    answer = (
        r"^tracking\.openmetrics: prometheus_client is not installed; pip install 'dynamo-megatron\[openmetrics\]'$"
    )
    setting = config(tmp_path).model_copy(update={"tracking": TrackingConfig(openmetrics=9400)})
    with pytest.raises(ValueError, match=answer):
        check_trackers(setting)


def test_mlflow_gets_every_metric_and_goes_on_with_its_run(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("alembic")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    setting = config(tmp_path, "mlflow")
    check_trackers(setting)
    track(setting, 0, range(1, 4), 0.5)
    track(setting, 3, range(4, 6), 0.75)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("dynamo-megatron").experiment_id])
    assert run.info.run_id == (tmp_path / "mlflow-id").read_text() and run.info.status == "FINISHED"
    assert run.info.run_name == tmp_path.name and run.data.params["optimizer.lr"] == "1e-06"
    history = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "reward/mean")]
    assert history == [(1, 0.5), (2, 0.5), (3, 0.5), (4, 0.75), (5, 0.75)]
    assert [m.value for m in client.get_metric_history(run.info.run_id, "eval/pass_1")] == [0.25, 0.375]


def test_trackio_gets_every_metric_and_goes_on_with_its_run(tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "database"))
    setting = config(tmp_path / "run", "trackio")
    (tmp_path / "run").mkdir()
    check_trackers(setting)
    track(setting, 0, range(1, 4), 0.5)
    track(setting, 3, range(4, 6), 0.75)
    program = (
        "import json, trackio\n"
        "from trackio.sqlite_storage import SQLiteStorage\n"
        "(run,) = trackio.Api().runs('dynamo-megatron')\n"
        "rows = SQLiteStorage.get_metric_values('dynamo-megatron', run.name, 'reward/mean')\n"
        "print(json.dumps([run.name, [(row['step'], row['value']) for row in rows]]))\n"
    )
    found = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    name, rows = json.loads(found.stdout.splitlines()[-1])
    assert name == (tmp_path / "run" / "trackio-id").read_text() and name.startswith("run-")
    assert rows == [[1, 0.5], [2, 0.5], [3, 0.5], [4, 0.75], [5, 0.75]]


def test_swanlab_writes_its_files_offline(tmp_path, monkeypatch):
    pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    setting = config(tmp_path, "swanlab")
    check_trackers(setting)
    track(setting, 0, range(1, 4), 0.5)
    track(setting, 3, range(4, 6), 0.75)
    log = (tmp_path / "logs" / "tracker-swanlab.log").read_text()
    assert "Traceback" not in log and len(list((tmp_path / "swanlab").glob("*run-*"))) == 2, log


@pytest.fixture
def endpoint(tmp_path):
    """(port, tracker) of an OpenMetrics endpoint that listens."""
    pytest.importorskip("prometheus_client")
    port = free_port()  # not one of those that connections get, of which another test may take it meanwhile
    setting = config(tmp_path).model_copy(update={"tracking": TrackingConfig(openmetrics=port)})
    check_trackers(setting)
    (tracker,) = open_trackers(setting, 0, fail)
    yield port, tracker
    close_trackers([tracker], 60)


def scraped(port: int, until: str) -> dict[str, float]:
    """The samples that the endpoint gives once `until` is among its lines."""
    deadline = time.monotonic() + 60
    while True:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page,
        ):
            lines = page.read().decode().splitlines()
            if until in lines:
                return {name: float(v) for name, v in (x.split() for x in lines if not x.startswith("#"))}
        assert time.monotonic() < deadline
        time.sleep(0.1)


def words_of(process: psutil.Process) -> list[str]:
    """Its command line; empty where it has ended, as another test's child may have."""
    try:
        return process.cmdline()
    except (psutil.ZombieProcess, psutil.NoSuchProcess):
        return []


def test_the_endpoint_has_the_last_value_of_each_metric(endpoint):
    port, tracker = endpoint
    tracker.write({"step": 1, "policy/grad_norm": 0.5, "eval/pass@1": 0.25})
    scraped(port, "dynamo_megatron_step 1.0")
    tracker.write({"step": 2, "policy/grad_norm": 1.5})
    assert scraped(port, "dynamo_megatron_step 2.0") == {
        "dynamo_megatron_step": 2.0,
        "dynamo_megatron_policy_grad_norm": 1.5,
        "dynamo_megatron_eval_pass_1": 0.25,
    }


def test_metrics_whose_names_become_equal_are_one(endpoint):
    port, tracker = endpoint
    tracker.write({"step": 1, "eval/pass@1": 0.25, "eval/pass_1": 0.5, "reward/größe": 2.0})
    assert scraped(port, "dynamo_megatron_step 1.0") == {
        "dynamo_megatron_step": 1.0,
        "dynamo_megatron_eval_pass_1": 0.5,
        "dynamo_megatron_reward_gr__e": 2.0,
    }


def test_the_endpoint_listens_on_loopback_alone_and_a_taken_port_is_refused(endpoint, tmp_path):
    port, tracker = endpoint
    tracker.write({"step": 1})
    scraped(port, "dynamo_megatron_step 1.0")
    (process,) = (p for p in psutil.Process().children() if "openmetrics" in words_of(p))
    assert {c.laddr for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN} == {("127.0.0.1", port)}
    setting = config(tmp_path).model_copy(update={"tracking": TrackingConfig(openmetrics=port)})
    with pytest.raises(
        ValueError, match=rf"^tracking\.openmetrics: port {port} cannot be used \(Address already in use"
    ):
        check_trackers(setting)
