"""The command from its folder to its three files, and what it refuses."""

import json
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from recorded import write_run

from dynamo_megatron.cli import main
from dynamo_megatron.replay import what_if
from dynamo_megatron.replay.recording import read_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "sums"
    write_run(folder)
    return folder


def refused(capsys, *arguments) -> str:
    assert main(["replay", *map(str, arguments)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    return err.strip()


def table(text: str) -> dict[str, list[str]]:
    """The rows of the first table by their first cell."""
    lines = text.split("## What each")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines if line.startswith("| ")]
    return {row[0]: row[1:] for row in rows[2:]}


def test_a_run(run, capsys):
    before = {path.name for path in run.iterdir()}
    assert main(["replay", str(run)]) == 0
    text = capsys.readouterr().out
    assert "Replaying the run's own allocator gives all 96 counts of allocation.jsonl exactly." in text
    assert {path.name for path in run.iterdir()} - before == {"replay.md", "replay.json", "replay.png"}
    assert (run / "replay.md").read_text().startswith(text.split("\n\nThis text is in")[0])
    rows = table(text)
    others = ["waterfill", "neyman,variance=energy", "knapsack", "cero", "gvm", "cures"]
    assert list(rows) == ["as recorded (neyman)", "uniform", *others, "oracle"]
    assert all(row[0] == "768" for row in rows.values())
    assert rows["uniform"][1] == "1.000" and rows["uniform"][-1] == "-" and rows["oracle"][2] == "1.000"
    objectives, rules = text.split("## What each of them")[1].split("## Rules that look")
    (even,) = (x for x in objectives.splitlines() if x.startswith("| uniform |"))
    by_rule = {line.split(" | ")[0]: line.strip("| ").split(" | ")[1:] for line in rules.splitlines() if " | " in line}
    assert [name for name in by_rule if "pilot" in name or "reinforce" in name] == [
        "| pilot", "| reinforce_ada", "| reinforce_ada, positive"
    ]  # fmt: skip
    assert by_rule["| uniform"][:2] == ["768", "100"] and float(by_rule["| pilot"][0]) <= 768
    assert float(by_rule["| reinforce_ada"][1]) < 60, "at most 4 of 8 rollouts are trained on"
    assert even.count("1.000") == 6
    assert float(rows["oracle"][1]) < float(rows["as recorded (neyman)"][1]) < 1
    with Image.open(run / "replay.png") as picture:
        assert picture.width >= 1000
        assert len(picture.convert("RGB").getcolors(maxcolors=2**24)) > 10


def test_the_numbers_behind_it(run, tmp_path, capsys):
    asked = ["neyman,variance=surprise,half_life=2", "uniform"]
    assert main(["replay", str(run), "--out", str(tmp_path), *(x for a in asked for x in ("--allocator", a))]) == 0
    found = json.loads((tmp_path / "replay.json").read_text())
    record = read_run(run)
    assert found["reproduced"] is True and found["first_difference"] is None and found["trainer"] == "dynamo-megatron"
    assert list(found["allocators"]) == ["as recorded (neyman)", *asked, "oracle"]
    assert found["allocators"][asked[0]]["config"]["half_life"] == 2
    assert found["degenerate_observed"] == what_if.degenerate_share(record.steps)
    even = what_if.expected_variance(what_if.success_rates(record.steps), np.full(96, 8)).sum()
    assert sum(found["allocators"]["uniform"]["expected_variance_by_step"]) == pytest.approx(even, rel=1e-12)
    recorded = found["allocators"]["as recorded (neyman)"]
    assert recorded["to_uniform"] == pytest.approx(sum(recorded["expected_variance_by_step"]) / even, rel=1e-12)
    for step in record.steps:  # every prompt of every step has its own counts
        for prompt_id in set(step.prompt_ids):
            (its,) = (p for p in found["prompts"] if p["prompt_id"] == prompt_id)
            counts = [
                n for s, n in zip(its["steps"], its["rollouts"]["as recorded (neyman)"], strict=True) if s == step.step
            ]
            assert counts == [n for i, n in zip(step.prompt_ids, step.given, strict=True) if i == prompt_id]


def test_what_is_not_reproduced_is_said_in_one_line(tmp_path, capsys):
    folder = tmp_path / "run"
    write_run(folder)
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("half_life: 8.0", "half_life: 1.0"))
    assert main(["replay", str(folder)]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("NOT REPRODUCED"))
    found = json.loads((folder / "replay.json").read_text())
    first = found["first_difference"]
    assert found["reproduced"] is False and f"step {first['step']}, prompt {first['prompt_id']!r}: " in line
    assert first["given"] != first["replayed"]
    assert "neyman" in found["allocators"]  # as it is replayed, beside what was recorded


def test_dumps_of_other_trainers(tmp_path, capsys):
    generator = np.random.default_rng(0)
    for step in range(1, 5):
        with (tmp_path / f"{step}.jsonl").open("w") as file:
            for i in range(6):
                for _ in range(32):  # above the upper bound of our own runs
                    score = float(generator.random() < i / 5)
                    file.write(json.dumps({"input": f"q{i}", "output": "", "score": score, "step": step}) + "\n")
    assert main(["replay", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    rows = table(text)
    assert list(rows)[:4] == ["as recorded", "uniform", "waterfill", "neyman"] and len(rows) == 10
    assert rows["as recorded"][1] == "1.000" and float(rows["neyman"][1]) < 1
    assert all(row[0] == str(4 * 6 * 32) for row in rows.values())
    assert "it has the step's budget and 8 to 96 rollouts for a prompt" in text
    assert "REPRODUCED" not in text and "own allocator" not in text
    found = json.loads((tmp_path / "replay.json").read_text())
    assert found["reproduced"] is None and found["prompts"][2]["prompt"] == "q2"


def test_a_record_in_which_nothing_is_ever_right(tmp_path, capsys):
    (tmp_path / "1.jsonl").write_text('{"input": "q", "score": 0}\n' * 4)
    assert main(["replay", str(tmp_path)]) == 0
    rows = table(capsys.readouterr().out)
    assert all(row[:4] == ["4", "-", "-", "100.0"] for row in rows.values())
    assert (tmp_path / "replay.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["--allocator", "nyman"],
            "algorithm.allocation.kind: 'nyman' is unknown; give uniform, waterfill, neyman, knapsack, cero, ",
        ),
        (["--allocator", "neyman,varience=surprise"], "did you mean algorithm.allocation.variance?"),
        (["--allocator", "neyman,half_life"], "'algorithm.allocation.half_life': neither a file nor key=value"),
        (
            ["--allocator", "uniform,budget=3"],
            "--allocator uniform,budget=3: a replay gives every allocator the budget",
        ),
        (["--allocator", "neyman,rollout_n_min=9"], "64 rollouts for 8 prompts is outside [72, 192]"),
        (["--success-threshold", "0.5"], "a run of ours, whose rollouts say themselves if they succeeded"),
    ],
)
def test_refused(run, tmp_path, capsys, options, says):
    assert says in refused(capsys, run, "--out", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def test_a_folder_of_something_else(tmp_path, capsys):
    (tmp_path / "notes.jsonl").write_text("{}\n")
    assert "no run (config.yaml), no rollouts of verl" in refused(capsys, tmp_path)
    assert "no run (config.yaml), no rollouts of verl" in refused(capsys, tmp_path / "nowhere")


def test_a_folder_that_cannot_be_written_to(run, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert "name a folder to write to with --out" in refused(capsys, run, "--out", tmp_path / "file")


def test_it_does_without_torch():
    """Which takes longer to import than a replay takes."""
    code = "import sys; import dynamo_megatron.replay.command; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
