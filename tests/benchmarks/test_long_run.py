"""The files of a long run that the benchmark makes, and what a resume reads of them: bytes, which no load changes."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from dynamo_megatron.algorithm.allocation import RolloutAllocator
from dynamo_megatron.checkpoint.folder import latest_checkpoint, read_state, verify, write_manifest, write_state
from dynamo_megatron.config import Config
from dynamo_megatron.jobs.output_dir import OutputDir
from dynamo_megatron.tracking import metrics
from dynamo_megatron.tracking.journal import Journal
from dynamo_megatron.tracking.metrics import read_rows

STEPS, PROMPTS, HISTORY = 400, 128, 5000


@pytest.fixture
def long_run(tmp_path, monkeypatch):
    """(config, folder): the files of a run of 1 step, made those of 400."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    monkeypatch.delitem(sys.modules, "long_run_resume", raising=False)
    from long_run_resume import lengthen

    stop = {"metric": "reward/mean", "above": 0.9}
    config = Config(
        model={"path": "m"},
        data={"source": "s"},
        trainer={"steps": STEPS + 1, "stop_when": stop},
        output_dir=str(tmp_path),
    )
    OutputDir(config).take_over(0)
    allocator = RolloutAllocator({})
    allocator.allocate(["a"], 8, step=1)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 0.5}) + "\n")
    rows = "".join(json.dumps(row) + "\n" for row in allocator.last.rows())
    (tmp_path / "allocation.jsonl").write_text(rows)
    folder = tmp_path / "checkpoints" / "step-000001"
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(b"weights")
    write_state(folder, {"stream": {"position": 1}, "allocator": allocator.history.state_dict()})
    write_manifest(folder, {"step": 1, "model": {}, "dtype": "bfloat16", "layout": None})
    lengthen(tmp_path, STEPS, PROMPTS, HISTORY)
    return config, tmp_path


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_resume_reads_little_of_a_long_run_and_keeps_what_is_before_its_checkpoint(long_run, monkeypatch):
    monkeypatch.setattr(metrics, "CHECKED_BYTES", 1 << 16)
    config, folder = long_run
    size = (folder / "allocation.jsonl").stat().st_size
    before = bytes_read()
    assert OutputDir(config).finished() is None
    journal = Journal(config)
    journal.open(STEPS)
    journal.close()
    read, replayed = bytes_read() - before, (folder / "metrics.jsonl").stat().st_size
    assert read < size / 4 and replayed < size / 40, (read, size)
    for name, lines in (("metrics", 1), ("allocation", PROMPTS)):
        steps = [row["step"] for row in read_rows(folder / f"{name}.jsonl", "step")]
        assert steps == [step for step in range(1, STEPS + 1) for _ in range(lines)]


def test_the_checkpoint_of_a_long_run_is_whole_and_its_history_loads(long_run):
    step, folder = latest_checkpoint(long_run[1] / "checkpoints")
    assert step == STEPS and verify(folder)
    state, allocator = read_state(folder), RolloutAllocator({})
    allocator.history.load_state_dict(state["allocator"])
    ids = state["allocator"]["prompt_ids"]
    assert state["stream"] == {"position": 1} and len(ids) == HISTORY
    drawn = [row["prompt_id"] for row in read_rows(long_run[1] / "allocation.jsonl", "prompt_id")]
    assert np.isin(drawn, ids).all()
    assert allocator.allocate(ids[:4], 32, step=2).tolist() == [8] * 4
