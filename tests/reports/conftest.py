"""Runs' folders made by hand."""

import json
from pathlib import Path

import pytest
import yaml

from dynamo_megatron.config import Config
from dynamo_megatron.config.files import to_plain
from dynamo_megatron.evaluation.results import results_file, summarise, write_results
from dynamo_megatron.rollout.store import RolloutStore
from dynamo_megatron.types import ProblemResult, Rollout


class Folders:
    """Makes runs' folders, and adds steps and evaluations to them."""

    def __init__(self, path: Path):
        self._path = path

    def run(self, name: str, rollouts: list[Rollout] = (), steps: int = 4, **config) -> Path:
        """A run whose rollouts' steps have lines in metrics.jsonl and, by groups, in allocation.jsonl."""
        folder = self._path / name
        folder.mkdir()
        trainer = {"steps": steps}
        made = Config(model={"path": "gone"}, data={"source": "d"}, trainer=trainer, output_dir=str(folder), **config)
        (folder / "config.yaml").write_text(yaml.safe_dump(to_plain(made)))
        for step in sorted({r.step for r in rollouts}):
            self.step(folder, step, [r for r in rollouts if r.step == step])
        return folder

    def step(self, folder: Path, step: int, rollouts: list[Rollout] = (), **metrics) -> None:
        for each in rollouts:
            RolloutStore(folder).append(each)
        groups = {r.group_id: r.prompt_id for r in rollouts}
        counts = {g: sum(r.group_id == g for r in rollouts) for g in groups}
        rows = [{"step": step, "prompt_id": p, "n": counts[g], "variance": 0.25} for g, p in groups.items()]
        self._append(folder / "allocation.jsonl", *rows)
        row = {"step": step, "reward/mean": 0.5, "policy/entropy": 1.0, "data/epoch": 0, "time/step": 2.0}
        self._append(folder / "metrics.jsonl", row | metrics)

    def evaluation(self, folder: Path, step: int, right: list[bool], of: str = "") -> None:
        fields = {"lengths": [3], "finish_reasons": ["stop"], "statuses": ["ok"], "responses": ["r"]}
        results = [ProblemResult(f"p{i}", "d", [float(r)], [r], **fields) for i, r in enumerate(right)]
        write_results(results_file(folder, step), results)
        self._append(folder / "evaluations.jsonl", {"step": step, **summarise(results, [1]), "eval/of": of})

    @staticmethod
    def _append(path: Path, *rows: dict) -> None:
        with path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def folders(tmp_path):
    return Folders(tmp_path)
