"""`report A B`: tables and a picture of several runs."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from dynamo_megatron.cli import main
from dynamo_megatron.config import Config
from dynamo_megatron.config.files import to_plain
from dynamo_megatron.evaluation.results import results_file, summarise, write_results
from dynamo_megatron.reports.side_by_side import write_side_by_side
from dynamo_megatron.types import ProblemResult


def write_run(folder: Path, steps: int, reward: float, *, chance: float | None = None, **algorithm) -> Path:
    """Reward rises by 0.01 a step to `reward`; `chance`: of a right response in its evaluations (None: it has none)."""
    config = Config(
        model={"path": "models/tiny"},
        data={"source": "sums.jsonl"},
        trainer={"steps": steps},
        algorithm=algorithm,
        output_dir=str(folder),
    )
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(to_plain(config)))
    rows = [
        {
            "step": step,
            "reward/mean": reward - 0.01 * (steps - step),
            "policy/entropy": 1 / step,
            "rollout/response_length_mean": 20.0,
            "time/step": 2.0,
        }
        for step in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if chance is not None:
        generator = np.random.default_rng(0)
        results = [
            ProblemResult(f"p{i}", "sums", *[[float(r) for r in right], [*map(bool, right)]], [5] * 4, *columns)
            for i in range(40)
            for right in [generator.random(4) < chance]
            for columns in [(["stop"] * 4, ["ok"] * 4, ["17"] * 4)]
        ]
        write_results(results_file(folder, steps), results)
        (folder / "evaluations.jsonl").write_text(json.dumps({"step": steps, **summarise(results, [1])}) + "\n")
    return folder


def cells(text: str, name: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_two_runs_side_by_side(tmp_path, capsys):
    first = write_run(tmp_path / "grpo", 40, 0.6, chance=0.5)
    second = write_run(tmp_path / "dynamo", 40, 0.7, chance=0.9, allocation={"kind": "uniform"})
    assert main(["report", str(first), str(second), "--out", str(tmp_path / "out")]) == 0
    printed, text = capsys.readouterr().out, (tmp_path / "out" / "comparison.md").read_text()
    assert printed.startswith(text.split("\n\n![")[0])
    assert cells(text, "figure") == ["grpo", "dynamo", "dynamo - grpo"]
    assert cells(text, "reward") == ["0.580", "0.680", "+0.100"]
    assert cells(text, "seconds per step, median") == ["2.00", "2.00", "+0.00"]
    assert cells(text, "gradient norm") == ["-", "-", "-"]  # not in these metrics
    before, after, difference = cells(text, "pass@1, %")
    gain = float(after.split()[0]) - float(before.split()[0])
    assert float(difference.split()[0]) == pytest.approx(gain, abs=0.11) and gain > 20 and " to +" in difference
    assert cells(text, "algorithm.allocation.kind") == ["'neyman'", "'uniform'"]
    assert "output_dir" not in text and "reward at step" not in text
    with Image.open(tmp_path / "out" / "comparison.png") as picture:
        assert picture.width >= 1000 and len(picture.convert("RGB").getcolors(maxcolors=2**24)) > 10
    assert not (first / "comparison.md").exists()


def test_different_lengths_and_a_run_without_evaluations(tmp_path):
    long = write_run(tmp_path / "long", 40, 0.6, chance=0.5)
    short = write_run(tmp_path / "short", 10, 0.5)
    third = write_run(tmp_path / "third", 20, 0.5)
    text = write_side_by_side([long, short, third], long)
    assert cells(text, "reward") == ["0.580", "0.480", "-0.100", "0.480", "-0.100"]
    assert cells(text, "reward at step 10") == ["0.280", "0.480", "+0.200", "0.380", "+0.100"]
    passes = cells(text, "pass@1, %")
    assert passes[1:] == ["-", "-", "-", "-"] and passes[0] != "-"
    assert cells(text, "at step")[:2] == ["40", "-"]
    assert (long / "comparison.png").is_file()
    none = write_side_by_side([short, third], tmp_path / "none")
    assert "None of the runs has an evaluation" in none and (tmp_path / "none" / "comparison.png").is_file()


def test_runs_of_one_name_go_by_their_paths(tmp_path):
    runs = [write_run(tmp_path / part / "rl", 5, 0.5) for part in ("a", "b")]
    assert cells(write_side_by_side(runs, tmp_path), "figure")[:2] == [str(run) for run in runs]


def test_other_problems_have_no_difference(tmp_path):
    runs = [write_run(tmp_path / name, 5, 0.5, chance=0.5) for name in ("a", "b")]
    file = results_file(runs[1], 5)
    file.write_text(file.read_text().replace(': "p', ': "other-p'))
    text = write_side_by_side(runs, tmp_path)
    assert cells(text, "pass@1, %")[2] == "-" and "No difference is given" in text


@pytest.mark.parametrize("wrong", ["missing", "repeated"])
def test_a_wrong_folder_is_one_line_and_writes_nothing(tmp_path, capsys, wrong):
    run = write_run(tmp_path / "run", 5, 0.5)
    other = tmp_path / "missing" if wrong == "missing" else run / ".." / "run"
    assert main(["report", str(run), str(other)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and ("missing: no config.yaml" in said or "named twice" in said)
    assert not (run / "comparison.md").exists()
