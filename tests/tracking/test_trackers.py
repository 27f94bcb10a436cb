from __future__ import annotations

import importlib.util
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo_megatron.config import Config
from dynamo_megatron.tracking.trackers import check_trackers, open_trackers


def config(output: Path, *backends: str) -> Config:
    return Config(
        model={"path": "m"}, data={"source": "s"}, output_dir=str(output), tracking={"backends": ["jsonl", *backends]}
    )


def track(setting: Config, start: int, steps: range, reward: float) -> None:
    for tracker in open_trackers(setting, start):
        for step in steps:
            tracker.write({"step": step, "reward/mean": reward, "policy/tokens": 10 * step})
            if step % 2 == 0:
                tracker.write({"step": step, "eval/pass@1": reward / 2})
        tracker.close()


def scalars(output: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(output / "tensorboard"))
    events.Reload()
    return [(e.step, e.value) for e in events.Scalars(name)]


def test_jsonl_alone_needs_no_tracker(tmp_path):
    assert open_trackers(config(tmp_path), 0) == [] and list(tmp_path.iterdir()) == []


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
    (tracker,) = open_trackers(config(tmp_path, "tensorboard"), 0)
    tracker.write({"step": 1, "reward/mean": 0.5})
    assert scalars(tmp_path, "reward/mean") == [(1, 0.5)]
    tracker.close()


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


def test_a_run_goes_on_when_wandbs_own_process_is_ended(tmp_path):
    """SLURM sends SIGTERM to every process of a job; the ranks save, and log."""
    pytest.importorskip("wandb")
    program = (
        "import psutil\n"
        "from dynamo_megatron.config import Config\n"
        "from dynamo_megatron.tracking.trackers import open_trackers\n"
        f"setting = Config.model_validate_json({config(tmp_path, 'wandb').model_dump_json()!r})\n"
        "(tracker,) = open_trackers(setting, 0)\n"
        "(core,) = [p for p in psutil.Process().children() if 'wandb-core' in ' '.join(p.cmdline())]\n"
        "core.terminate()\n"
        "core.wait(20)\n"
        "for step in (1, 2):\n"
        "    tracker.write({'step': step, 'reward/mean': 0.5})\n"
        "tracker.close()\n"
        "print('closed')\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    environment["WANDB_MODE"] = "offline"
    command = [sys.executable, "-P", "-c", program]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "wandb: its process has ended; step 1 is in metrics.jsonl alone" in result.stdout
    assert result.stdout.endswith("closed\n")


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


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_a_package_that_is_missing_is_named(tmp_path):
    answer = r"^tracking\.backends: wandb is not installed; pip install 'dynamo-megatron\[wandb\]'$"
    with pytest.raises(ValueError, match=answer):
        check_trackers(config(tmp_path, "wandb"))
