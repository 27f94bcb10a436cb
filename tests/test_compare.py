import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from dynamo_megatron.evaluation.results import results_file, summarise, write_results
from dynamo_megatron.types import ProblemResult

TOOL = Path(__file__).parents[1] / "tools" / "compare.py"


def write_run(
    folder: Path, gain: float, seed: int, *, problems: int = 60, steps: int = 40, k=(1, 8), batch_prompts: int = 32
) -> Path:
    """pass@1 is about 0.3 before and 0.3 + gain after; difficulty belongs to the problem, luck to the seed."""
    generator = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    config = {
        "model": {"path": "m"},
        "data": {"source": "d", "batch_prompts": batch_prompts},
        "rollout": {},
        "algorithm": {"allocation": {"budget": None}},
        "trainer": {"steps": steps, "stop_when": None},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    hard = np.random.default_rng(0).uniform(-0.3, 0.3, problems)
    evaluations = []
    for step in range(0, steps + 1, 10):
        chance = np.clip(0.3 + gain * step / steps + hard, 0, 1)
        results = []
        for i in range(problems):
            right = generator.random(8) < chance[i]
            columns = (["stop"] * 8, ["ok"] * 8, ["17"] * 8)
            rewards, successes = [float(r) for r in right], [bool(r) for r in right]
            results.append(ProblemResult(f"p/{i}", "sums", rewards, successes, [5] * 8, *columns))
        write_results(results_file(folder, step), results)
        evaluations.append({"step": step, **summarise(results, k)})
    rows = [
        {"step": step, "reward/mean": 0.3 + gain * step / steps + generator.normal(0, 0.05)}
        for step in range(1, steps + 1)
    ]
    for name, lines in (("evaluations.jsonl", evaluations), ("metrics.jsonl", rows)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def compare(tmp_path, monkeypatch, capsys):
    """Runs the tool; returns (exit code, standard output, standard error)."""

    def run(*arms: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["compare.py", str(tmp_path / "out"), *arms])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(TOOL), run_name="__main__")
        return end.value.code, *capsys.readouterr()

    return run


def test_a_real_difference(compare, tmp_path):
    uniform = [write_run(tmp_path / f"uniform-{s}", 0.1, s) for s in range(3)]
    neyman = [write_run(tmp_path / f"neyman-{s}", 0.3, 10 + s) for s in range(3)]
    code, text, _ = compare(*(f"{name}={','.join(map(str, runs))}" for name, runs in (("U", uniform), ("N", neyman))))
    assert code == 0
    assert (tmp_path / "out" / "compare.md").read_text() == f"{text}\n![the arms over training](compare.png)\n"
    assert "U, N on 60 held-out problems" in text and "n = 3 seeds" in text

    finals = [
        [json.loads((run / "evaluations.jsonl").read_text().splitlines()[-1]) for run in arm]
        for arm in (uniform, neyman)
    ]
    u, n = (100 * np.array([final["eval/pass@1"] for final in arm]) for arm in finals)
    row = next(line for line in text.splitlines() if line.startswith("| U | 40 |"))
    half = 4.303 * u.std(ddof=1) / np.sqrt(3)
    assert f"| {u.mean():.1f} ({u.mean() - half:.1f} to {u.mean() + half:.1f}) |" in row
    difference = n - u
    half = 4.303 * difference.std(ddof=1) / np.sqrt(3)
    seeds = f"{difference.mean() - half:+.1f} to {difference.mean() + half:+.1f}"
    assert f"| N, pass@1 | {difference.mean():+.1f} | {seeds} | " in text
    assert f"pass@1: N is {difference.mean():.1f} points above U; the interval over seeds does not contain 0" in text
    assert "| N, pass@8 |" in text
    with Image.open(tmp_path / "out" / "compare.png") as picture:
        assert picture.width >= 1000
        assert len(picture.convert("RGB").getcolors(maxcolors=2**24)) > 10


def test_no_difference_and_one_seed(compare, tmp_path):
    runs = [write_run(tmp_path / str(s), 0.1, s) for s in range(2)]
    code, text, _ = compare(f"a={runs[0]}", f"b={runs[1]}")
    assert code == 0 and "n = 1 seed, no interval" in text
    assert "one seed says nothing of other seeds, the interval over problems contains 0." in text


def test_a_gain_that_seeds_do_not_share(compare, tmp_path):
    first = [write_run(tmp_path / f"a{s}", 0.1, s) for s in range(2)]
    second = [write_run(tmp_path / f"b{s}", gain, 10 + s) for s, gain in enumerate((0.1, 0.6))]
    _, text, _ = compare(*(f"{name}={runs[0]},{runs[1]}" for name, runs in (("a", first), ("b", second))))
    assert "above a; the interval over seeds contains 0, the interval over problems does not contain 0" in text


def test_what_cannot_be_compared_is_one_clear_line(compare, tmp_path):
    a, b, c = (write_run(tmp_path / name, 0.1, 0) for name in "abc")
    fewer = write_run(tmp_path / "fewer", 0.1, 0, problems=50)
    other_k = write_run(tmp_path / "other_k", 0.1, 0, k=(2,))
    other_budget = write_run(tmp_path / "other_budget", 0.1, 0, batch_prompts=16)
    early = write_run(tmp_path / "early", 0.1, 0)
    rows = (early / "metrics.jsonl").read_text().splitlines(keepends=True)
    (early / "metrics.jsonl").write_text("".join(rows[:30]))
    killed = write_run(tmp_path / "killed", 0.1, 0)
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "reward/mean": 0.5}\n')
    for arms, said in (
        ([f"x={a}"], "arms: 1 given"),
        ([f"x={a}", "y"], "'y': give an arm as NAME=RUN"),
        ([f"x={a}", f"y={b},"], "give an arm as NAME=RUN"),
        ([f"x={a}", f"x={b}"], "there is an arm x already"),
        ([f"x={a}", f"y={b},{c}"], "same number of seeds, these have x 1, y 2"),
        ([f"x={a}", f"y={b.parent}/./a"], "a run is named twice"),
        ([f"x={a}", f"y={tmp_path}/none"], "none: no config.yaml"),
        ([f"x={a}", f"y={killed}"], "killed: no evaluation at its last step, 41"),
        ([f"x={a}", f"y={early}"], "early: at step 30 of 40"),
        ([f"x={a}", f"y={other_budget}"], "other_budget: data.batch_prompts is 16, in"),
        ([f"x={a}", f"y={fewer}"], "problem 'p/50' is not in every evaluation"),
        ([f"x={a}", f"y={other_k}"], "no pass@k in common"),
    ):
        code, out, error = compare(*arms)
        assert code == 2 and not out and said in error and error.count("\n") == 1
