"""The demo's figures: README's table is that of benchmarks/results/demo.json, and the benchmark makes both."""

import json
import subprocess
import sys
from pathlib import Path

import demo
import pytest

ROOT = Path(__file__).parents[2]
BEGIN, END = demo.marks("demo")


def results(*after: float) -> dict:
    runs = [
        {
            "seed": seed,
            "steps": 64,
            "problems": 1024,
            "pass@1 before": 0.41,
            "pass@1 after": value,
            "gain": [value - 0.41, value - 0.43, value - 0.39],
            "sometimes to always": 1.5 + seed / 10,
            "seconds per step": 1.5,
            "seconds": 300.0,
            "peak bytes": 3.0e9,
        }
        for seed, value in enumerate(after)
    ]
    return {
        "machine": {"cores": 2},
        "runs": runs,
        "runs with other instructions": runs[:2],
        "runs from other warm-ups": runs[2:],
    }


def test_readme_has_the_table_of_the_results():
    if not demo.RESULTS.is_file():
        pytest.skip("no figures in this checkout: make demo-figures")
    part = demo.readme_part(json.loads(demo.RESULTS.read_text(encoding="utf-8")))
    assert demo.README.read_text(encoding="utf-8").count(BEGIN + part + END) == 1


def test_the_table_has_the_mean_and_the_range_of_every_group():
    lines = demo.readme_part(results(0.7, 0.8, 0.75, 0.5)).splitlines()
    assert lines[0].startswith("`make demo` on 2 CPU cores: pass@1 on 1024 held-out problems")
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines if line.startswith("|")]
    assert rows[2:] == [
        ("the demo, 4 seeds", "41.0 (41.0 to 41.0)", "68.8 (50.0 to 80.0)", "27.8 (9.0 to 39.0)"),
        (
            "the same seeds, other instructions of the CPU",
            "41.0 (41.0 to 41.0)",
            "75.0 (70.0 to 80.0)",
            "34.0 (29.0 to 39.0)",
        ),
        ("2 other warm-ups", "41.0 (41.0 to 41.0)", "62.5 (50.0 to 75.0)", "21.5 (9.0 to 34.0)"),
    ]
    text = " ".join(lines)
    assert "takes 5.0 (5.0 to 5.0) minutes, a step 1.50 (1.50 to 1.50) seconds" in text
    assert "got 1.65 (1.50 to 1.80) times the rollouts" in text


def test_a_figure_that_a_run_lacks_and_a_group_without_runs_are_left_out():
    made = results(0.7, 0.8)
    made["runs"][1]["sometimes to always"] = None
    part = demo.readme_part(made)
    assert "times the rollouts" not in part and "gain" in part and "warm-ups" not in part


def test_only_the_table_is_replaced(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}old\n{END}after\n")
    demo.write_part(readme, "demo", "new\n")
    assert readme.read_text() == f"before\n{BEGIN}new\n{END}after\n"
    readme.write_text(f"no end\n{BEGIN}")
    with pytest.raises(ValueError, match="there must be one line"):
        demo.write_part(readme, "demo", "new\n")


@pytest.mark.full
def test_the_benchmark_runs_and_does_not_repeat_what_is_finished(tmp_path):
    def run(*arguments: object) -> str:
        command = [sys.executable, "-P", *map(str, arguments)]
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=900).stdout

    task, readme, out = tmp_path / "task", tmp_path / "README.md", tmp_path / "demo.json"
    run("tools/demo_task.py", task)
    readme.write_text(BEGIN + END)
    arguments = [
        "benchmarks/demo.py",
        *("--seeds", "1", "--warmups", task / "model", "--runs", tmp_path / "runs", "--out", out, "--readme", readme),
        *("--", f"data.source={task / 'pool.jsonl'}", f"eval.data={task / 'held_out.jsonl'}"),
        *("eval.limit=20", "eval.every=2", "trainer.steps=2"),
    ]
    run(*arguments)
    first = json.loads(out.read_text())
    runs = [*first["runs"], *first["runs with other instructions"], *first["runs from other warm-ups"]]
    assert [made["seed"] for made in runs] == [1, 1, 1]
    for made in runs:
        assert made["steps"] == 2 and made["problems"] == 20 and made["seconds"] > made["seconds per step"] > 0
        assert 3e8 < made["peak bytes"] < 2e10
        assert sum(made["parts of a step"].values()) <= 1.5 * made["seconds per step"]
    assert runs[0]["pass@1 before"] > runs[2]["pass@1 before"], "random weights"
    assert readme.read_text() == BEGIN + demo.readme_part(first) + END
    run(*arguments)
    again = json.loads(out.read_text())
    assert [made["seconds"] for made in again["runs"]] == [made["seconds"] for made in first["runs"]]
