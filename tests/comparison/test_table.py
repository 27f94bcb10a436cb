"""From runs on disk to curves.jsonl, tables and the picture."""

import json
import shutil

import pytest

from dynamo_megatron.cli import main
from dynamo_megatron.comparison.spec import RunOutcome, planned_runs, write_outcome

RATES, STEPS = (1e-6, 1.5e-6), 4
NAN = "rank 1, step 3: NonFiniteError: the gradient norm is nan: prompt 7"


def write_run(
    run, final: float, *, start: float = 0.2, of: str = "a", said: str = "done", code: int = 0, batch: int = 10
) -> None:
    """A straight line from `start` to `final`; `batch` rollouts of 7 tokens a step, an evaluation every second one."""
    steps = STEPS if code == 0 else 2
    run.folder.mkdir(parents=True)
    metrics = [
        {
            "step": step,
            "rollout/requested": batch,
            "rollout/response_tokens": 7 * batch,
            "time/step": 5.0,
            "time/evaluate": 2.0 * (step % 2),  # of the evaluation after the step before
            "time/save": 1.0,
        }
        for step in range(1, steps + 1)
    ]
    evaluations = [
        {
            "step": step,
            "eval/of": of,
            "eval/pass@1": start + (final - start) * step / STEPS,
            "eval/pass@4": 0.9,
            "eval/seconds": 2.0,
        }
        for step in range(0, steps + (1 if code == 0 else 3), 2)  # one more: killed before it wrote the metrics
    ]
    for name, rows in (("metrics", metrics), ("evaluations", evaluations)):
        (run.folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    write_outcome(run, RunOutcome(code, said))


@pytest.fixture
def made(spec):
    """made(seeds, what) -> the runs; `what(run)`: arguments of write_run, None for a run that has not ended."""

    def make(seeds, what):
        arms = {"grpo": [], "half": ["data.batch_prompts=16"], "wild": ["algorithm.modulation=null"]}
        arms = {name: [*keys, f"trainer.steps={STEPS}"] for name, keys in arms.items()}
        runs = planned_runs(spec(arms=arms, seeds=seeds, learning_rates=list(RATES)))
        for run in runs:
            if (arguments := what(run)) is not None:
                write_run(run, **arguments)
        return runs

    return make


def usual(run):
    """grpo's best final score is .6 at the first rate, and 1.5e-6 is of no use; wild diverges there on seed 2."""
    if run.arm == "wild" and run.seed == 2 and run.rate == RATES[1]:
        return {"final": 0.9, "said": NAN, "code": 1}
    final = {"grpo": (0.6, 0.3), "half": (0.6, 0.25), "wild": (0.2, 0.9)}[run.arm][RATES.index(run.rate)]
    return {"final": final, "batch": 5 if run.arm == "half" else 10}


def test_tables_of_five_seeds(made, tmp_path, capsys):
    made([1, 2, 3, 4, 5], usual)
    assert main(["compare", "spec.yaml", "--table"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| grpo | 0 of 10 | 1e-06 | 60.0 (60.0 to 60.0) | - |" in lines
    assert "| half | 0 of 10 | 1e-06 | 60.0 (60.0 to 60.0) | +0.0 (+0.0 to +0.0) |" in lines
    assert "| wild | 1 of 10 | 1e-06 | 20.0 (20.0 to 90.0) | -40.0 (-40.0 to +30.0) |" in lines
    assert "- **wild: 1 of 10 runs failed** (by learning rate: 1 at 1.5e-06)" in lines
    # half of .4 above .2: after two steps, 20 rollouts of 7 tokens; 2 + 4 s of their 5 s without evaluation and save
    half = next(i for i, line in enumerate(lines) if line.startswith("## Cost of half of grpo's gain"))
    assert lines[half + 2].startswith("To a score of 40.0 %")
    assert lines[half + 2].endswith("; infinite at one where the run of a seed failed.")
    assert lines[half + 6] == "| grpo | 0 of 5 | 20 at 1e-06 | - | 140 at 1e-06 | - | 6 at 1e-06 | - |"
    ratios = "10 at 1e-06 | 0.50 (0.50 to 0.50) | 70 at 1e-06 | 0.50 (0.50 to 0.50) | 6 at 1e-06 | 1.00 (1.00 to 1.00)"
    assert lines[half + 7] == f"| half | 0 of 5 | {ratios} |"
    assert lines[half + 8].startswith("| wild | 5 of 5 | never | never | never | never |")
    assert f"- 1 run ended with: {NAN}" in lines

    assert (tmp_path / "out" / "comparison.md").read_text().startswith("# Comparison of grpo, half, wild: ")
    rows = [json.loads(line) for line in (tmp_path / "out" / "curves.jsonl").read_text().splitlines()]
    assert len(rows) == 3 * 29 + 2
    first = [r for r in rows if (r["arm"], r["seed"], r["lr"]) == ("grpo", 1, RATES[0])]
    assert [(r["step"], r["rollouts"], r["tokens"], r["seconds"]) for r in first] == [
        (0, 0, 0, 0.0),
        (2, 20, 140, 6.0),
        (4, 40, 280, 12.0),
    ]
    assert [r["eval/pass@1"] for r in first] == pytest.approx([0.2, 0.4, 0.6])

    shutil.rmtree(tmp_path / "out" / "runs")  # its curves alone give the same tables
    assert main(["compare", "spec.yaml", "--table"]) == 1
    again = capsys.readouterr().out
    assert [line for line in lines if line.startswith("|")] == [x for x in again.splitlines() if x.startswith("|")]


def test_runs_evaluated_on_other_problems_are_refused(made, capsys):
    made([1, 2, 3, 4, 5], lambda run: usual(run) | ({"of": "b"} if run.seed == 4 else {}))
    assert main(["compare", "spec.yaml", "--table"]) == 2
    said = capsys.readouterr().err
    assert "-seed1 and out/runs/" in said and "-seed4: scores of different problems" in said


def test_curves_of_arms_that_are_evaluated_less_often(made, tmp_path, capsys):
    made([1, 2, 3, 4, 5], usual)
    assert main(["compare", "spec.yaml", "--table"]) == 0
    curves = tmp_path / "out" / "curves.jsonl"
    rows = [json.loads(line) for line in curves.read_text().splitlines()]
    curves.write_text("".join(f"{json.dumps(r)}\n" for r in rows if (r["arm"], r["step"]) != ("half", 2)))
    shutil.rmtree(tmp_path / "out" / "runs")
    capsys.readouterr()
    main(["compare", "spec.yaml", "--table"])
    assert "| half | 0 of 10 | 1e-06 | 60.0 (60.0 to 60.0) | +0.0 (+0.0 to +0.0) |" in capsys.readouterr().out


def test_a_seed_with_an_unfinished_run_is_left_out_and_four_seeds_give_no_ratio(made, tmp_path, capsys):
    made([1, 2, 3, 4, 5], lambda run: None if (run.arm, run.seed) == ("half", 4) else usual(run))
    assert main(["compare", "spec.yaml", "--table"]) == 0
    text = capsys.readouterr().out
    assert "- 28 of 30 runs have ended; left out: seeds 4" in text
    assert "No differences and no ratios: 4 seeds of the 5 that an interval over seeds needs at least" in text
    shutil.rmtree(tmp_path / "out" / "runs")
    main(["compare", "spec.yaml", "--table"])
    assert "- 28 of 30 runs have ended; left out: seeds 4" in capsys.readouterr().out, "from curves.jsonl"
    assert "| half | 0 of 8 | 1e-06 | 60.0 | - |" in text and "| 10 at 1e-06 | - | 70 at 1e-06 | - |" in text


def test_without_a_run_of_the_control_nothing_is_gained_or_lost(made, capsys):
    made([1, 2, 3, 4, 5], lambda run: usual(run) | ({"code": 1} if (run.arm, run.seed) == ("grpo", 1) else {}))
    main(["compare", "spec.yaml", "--table"])
    text = capsys.readouterr().out
    assert "no cost to reach it: at every learning rate one of its runs failed." in text
    assert "| half | 0 of 10 | 1e-06 | 60.0 (60.0 to 60.0) | - |" in text
