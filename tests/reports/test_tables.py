"""The numbers of a report: tables, findings, figures, and what prompts had shown before a visit."""

import pytest
from background_run import new_rollout

from dynamo_megatron.reports.figures import allocation_figures
from dynamo_megatron.reports.run_record import RunRecord, read_revisits, read_run, read_runs
from dynamo_megatron.reports.tables import sections


def table(runs, title: str) -> list[list[str]]:
    return next(s.rows for s in sections(runs) if s.title == title)


def record(rows: list[dict], path, **algorithm) -> RunRecord:
    config = {"model": {"path": "m"}, "data": {"source": "d"}, "trainer": {"steps": 99}, "rollout": {}}
    config["algorithm"] = {"allocation": {"kind": "neyman"}, "modulation": {"lambda_min": 0.6}, **algorithm}
    return RunRecord(path, config, [{"step": i + 1, **row} for i, row in enumerate(rows)], [])


def test_before_and_after_are_of_the_same_problems(folders):
    run = folders.run("run")
    folders.step(run, 1)
    folders.evaluation(run, 0, [False, True, False, True])
    assert table(read_runs([run]), "Held-out problems")[0] == ["%", "step 0"]
    folders.evaluation(run, 1, [True, True, False, True])
    head, row = table(read_runs([run]), "Held-out problems")
    assert head == ["%", "step 0", "step 1", "step 1 - step 0"]
    assert row[0] == "pass@1" and row[1].startswith("50.0 (") and row[3].startswith("+25.0 (")
    for step in (3, 4):
        folders.evaluation(run, step, [True] * 4, of="other sampling")
    assert table(read_runs([run]), "Held-out problems")[0] == ["%", "step 3", "step 4", "step 4 - step 3"]


def test_runs_side_by_side(folders):
    """Differences are to the first run."""
    runs = [folders.run(name, seed=seed) for seed, name in enumerate(("a", "b"))]
    for run in runs:
        folders.step(run, 1)
        folders.evaluation(run, 1, [run is runs[1]] * 3)
    both = read_runs(runs)
    assert list(both) == ["a", "b"]
    assert table(both, "Held-out problems")[1][3].startswith("+100.0 (")
    assert table(both, "Settings that differ")[1:] == [["data.shuffle_seed", "0", "1"], ["seed", "0", "1"]]
    assert "are of these steps: a 1, b 1" in sections(both)[1].text
    folders.evaluation(runs[1], 2, [True] * 3, of="other sampling")
    assert table(read_runs(runs), "Held-out problems")[1][3] == "-"
    with pytest.raises(ValueError, match="named twice"):
        read_runs([runs[0], runs[0]])


def test_revisits_count_earlier_steps_only(folders):
    """A prompt twice in a step has no history in either place; failed rollouts say nothing of a prompt."""
    first = [
        new_rollout(1, g, k, reward, prompt_id="a") for g, k, reward in ((0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 0))
    ]
    others = [
        new_rollout(2, 0, 0, 1, prompt_id="b", status="failed"),
        *(new_rollout(3, 0, k, 1 - k, prompt_id="a", status=("ok", "failed")[k]) for k in (0, 1)),
        new_rollout(4, 0, 0, 1, prompt_id="b"),
        *(new_rollout(4, 1, k, 1, prompt_id="a") for k in range(6)),
    ]
    run = folders.run("run", first + others)
    revisits = read_revisits(run)
    assert revisits.success_rates.tolist() == [0.25, 0.4] and revisits.rollouts.tolist() == [2, 6]
    assert revisits.uniform == 14 / 6
    (by_rate,) = allocation_figures({"run": revisits})
    assert (by_rate["data"][0]["x"], by_rate["data"][0]["y"]) == ([0.325], [4.0])
    (run / "rollouts" / "step-000002.jsonl.zst").unlink()
    assert read_revisits(run) is None


def test_the_rounds_of_a_step_are_one_visit(folders):
    groups = ((1, 0, "a"), (2, 0, "a"), (2, 1, "b"), (2, 2, "a"))
    rollouts = [new_rollout(step, g, k, reward=k, prompt_id=p) for step, g, p in groups for k in range(2)]
    algorithm = {"allocation": {"kind": "uniform", "budget": 512}, "sequential": {"round_n": 8}}
    revisits = read_revisits(folders.run("run", rollouts, algorithm=algorithm))
    assert (revisits.success_rates.tolist(), revisits.rollouts.tolist(), revisits.uniform) == ([0.5], [4], 8 / 3)


def test_findings_warn(tmp_path):
    falling = [{"policy/entropy": 1.0 - 0.033 * i, "rollout/logprob_gap_mean": 1e-4 * 1.2**i} for i in range(31)]
    longer = [{"reward/mean": i / 30, "rollout/response_length_mean": 100.0 + 3 * i} for i in range(31)]
    rows = [a | b | {"policy/damped_share": 0.0} for a, b in zip(falling, longer, strict=True)]
    healthy = {"policy/entropy": 1.0, "rollout/logprob_gap_mean": 1e-4, "reward/mean": 0.5, "policy/damped_share": 0.01}
    fine = [row | healthy for row in rows]
    runs = {"bad": record(rows, tmp_path), "good": record(fine, tmp_path), "short": record(rows[:19], tmp_path)}
    found = [row[1:3] for row in table(runs, "Findings")[1:]]
    assert found == [
        [name, said] for name, said in zip(runs, ("WARNING", "fine", "not measured"), strict=True) for _ in range(4)
    ]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("folder", "no config.yaml"),
        ("steps", "no step in metrics.jsonl"),
        ("sft", "a run of sft"),
        ("line", r"metrics.jsonl:2: not JSON"),
    ],
)
def test_what_is_no_run_is_one_clear_line(folders, tmp_path, fault, message):
    if fault != "folder":
        folder = folders.run("run")
        rows = {"steps": "", "sft": '{"step": 1, "sft/loss": 2.0}\n', "line": '{"step": 1}\nnonsense\n'}
        (folder / "metrics.jsonl").write_text(rows[fault])
    with pytest.raises(ValueError, match=message) as error:
        read_run(tmp_path / "run")
    assert "\n" not in str(error.value)
