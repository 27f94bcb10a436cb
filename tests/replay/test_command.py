"""The command from its folder to its three files, and what it refuses."""

import json

import numpy as np
import pytest
from recorded import write_run

from dynamo_megatron.cli import main
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
    lines = text.split("## Mean rollouts")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines if line.startswith("| ")]
    return {row[0]: row[1:] for row in rows[2:]}


def test_a_run(run, tmp_path, capsys):
    assert main(["replay", str(run), "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "Replaying the run's own allocator gives all 96 counts of allocation.jsonl exactly." in text
    assert {path.name for path in tmp_path.iterdir()} == {"replay.md", "replay.json"}
    assert (tmp_path / "replay.md").read_text().startswith(text.split("\n\nThis text is in")[0])
    rows = table(text)
    others = ["waterfill", "neyman", "neyman,variance=energy", "knapsack", "cero", "gvm", "cures"]
    assert list(rows) == ["as recorded", "uniform", *others, "oracle"]
    assert all(row[0] == "768" for row in rows.values())
    assert rows["as recorded"] == rows["neyman"] and rows["uniform"][1] == rows["oracle"][2] == "1.000"
    assert float(rows["oracle"][1]) < float(rows["neyman"][1]) < 1


def test_the_numbers_behind_it(run, tmp_path):
    asked = ["uniform", "neyman,variance=surprise,half_life=2"]
    assert main(["replay", str(run), "--out", str(tmp_path), *(x for a in asked for x in ("--allocator", a))]) == 0
    found = json.loads((tmp_path / "replay.json").read_text())
    record = read_run(run)
    assert found["reproduced"] is True and found["first_difference"] is None and found["trainer"] == "dynamo-megatron"
    assert list(found["prompts"][0]["rollouts"]) == ["as recorded", *asked, "oracle"]
    for step in record.steps:  # every prompt of every step has its own counts
        for prompt_id in set(step.prompt_ids):
            (its,) = (p for p in found["prompts"] if p["prompt_id"] == prompt_id)
            counts = [n for s, n in zip(its["steps"], its["rollouts"]["as recorded"], strict=True) if s == step.step]
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


def test_dumps_of_other_trainers(tmp_path, capsys):
    """Four steps with 32 rollouts, above the upper bound of our own runs."""
    generator = np.random.default_rng(0)
    for step in range(1, 5):
        rows = [{"input": f"q{i}", "score": float(generator.random() < i / 5)} for i in range(6) for _ in range(32)]
        (tmp_path / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["replay", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    rows = table(text)
    assert len(rows) == 10 and float(rows["neyman"][1]) < 1 and all(row[0] == str(4 * 6 * 32) for row in rows.values())
    assert "it has the step's budget and 8 to 96 rollouts for a prompt" in text
    assert "REPRODUCED" not in text and "own allocator" not in text
    found = json.loads((tmp_path / "replay.json").read_text())
    assert found["reproduced"] is None and found["prompts"][2]["prompt"] == "q2"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--allocator", "nyman"], "algorithm.allocation.kind: 'nyman' is unknown"),
        (["--allocator", "neyman,varience=surprise"], "did you mean algorithm.allocation.variance?"),
        (["--allocator", "uniform,budget=3"], "a replay gives every allocator the budget"),
        (["--allocator", "neyman,rollout_n_min=9"], "64 rollouts for 8 prompts is outside [72, 192]"),
    ],
)
def test_refused(run, tmp_path, capsys, options, says):
    assert says in refused(capsys, run, "--out", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def test_folders_of_something_else(run, tmp_path, capsys):
    (tmp_path / "notes.jsonl").write_text("{}\n")
    assert "no run (config.yaml), no rollouts of verl" in refused(capsys, tmp_path)
    assert "name a folder to write to with --out" in refused(capsys, run, "--out", tmp_path / "notes.jsonl")
