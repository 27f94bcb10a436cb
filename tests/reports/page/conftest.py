"""Runs' folders made by hand, and a chart library that draws nothing."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from dynamo_megatron.config import Config
from dynamo_megatron.config.files import to_plain
from dynamo_megatron.reports.run_record import RunRecord, read_run
from dynamo_megatron.rollout.store import RolloutStore
from dynamo_megatron.types import Rollout


def made_rollout(step: int, position: int, index: int, reward: float = 0.0, **fields) -> Rollout:
    """A prompt of two tokens, a response of two."""
    group = f"{step:06d}-{position:04d}"
    defaults = {
        "tokens": [20, 21, 30, 31],
        "response_mask": [0, 0, 1, 1],
        "engine_logprobs": [-1.0, -2.0],
        "weight_versions": [(step - 1, 0, 2)],
        "finish_reason": "stop",
        "success": reward > 0.5,
        "reward_parts": {"math": reward},
        "prompt": f"What is {position}?",
        "response": f"I say {index}.",
        "answer": str(position),
    }
    prompt_id = fields.pop("prompt_id", f"p{position}")
    return Rollout(f"{group}-{index:03d}", group, prompt_id, step, reward=reward, **{**defaults, **fields})


@pytest.fixture
def new_rollout():
    return made_rollout


@pytest.fixture
def record():
    """make(metrics, **algorithm) -> a RunRecord without files."""

    def make(metrics: list[dict], **algorithm) -> RunRecord:
        config = Config(model={"path": "m"}, data={"source": "d"}, output_dir="o", algorithm=algorithm)
        return RunRecord(Path("o"), to_plain(config), metrics, [])

    return make


@pytest.fixture
def make_run(tmp_path):
    """make(name, rollouts, steps=..., **sections of the config) -> a run's folder; every step has a line in
    metrics.jsonl and, of the groups of its rollouts, in allocation.jsonl."""

    def make(name: str, rollouts: list[Rollout], steps: int = 4, **config) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        trainer = {"steps": steps, **config.pop("trainer", {})}
        made = Config(model={"path": "gone"}, data={"source": "d"}, trainer=trainer, output_dir=str(folder), **config)
        (folder / "config.yaml").write_text(yaml.safe_dump(to_plain(made)))
        for each in rollouts:
            RolloutStore(folder).append(each)
        for step in sorted({r.step for r in rollouts}):
            write_step(folder, step, [r for r in rollouts if r.step == step])
        return folder

    return make


def write_step(folder: Path, step: int, rollouts: list[Rollout]) -> None:
    row = {"step": step, "reward/mean": 0.5, "policy/entropy": 1.0, "data/epoch": 0, "time/step": 2.0}
    groups = {r.group_id: r.prompt_id for r in rollouts}
    counts = {g: sum(r.group_id == g for r in rollouts) for g in groups}
    rows = [{"step": step, "prompt_id": p, "n": counts[g], "variance": 0.25} for g, p in groups.items()]
    with (folder / "allocation.jsonl").open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in rows)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


@pytest.fixture
def add_step():
    return write_step


@pytest.fixture
def read():
    return read_run


@pytest.fixture
def no_charts(monkeypatch):
    """In place of plotly, which need not be installed for it."""
    library = SimpleNamespace(get_plotlyjs=lambda: "var Plotly = {newPlot() {}};")
    monkeypatch.setitem(sys.modules, "plotly", SimpleNamespace(offline=library))
    monkeypatch.setitem(sys.modules, "plotly.offline", library)
