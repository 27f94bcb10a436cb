"""The command from its folder to its three files, and what it refuses."""

import json
import re

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
    others = ["waterfill", "neyman", "knapsack", "gvm", "cures"]
    assert list(rows) == ["as recorded", "uniform", *others] and all(row[0] == "768" for row in rows.values())
    assert rows["as recorded"] == rows["neyman"] and rows["uniform"][1] == "1.000" and float(rows["neyman"][1]) < 1
    found, record = json.loads((tmp_path / "replay.json").read_text()), read_run(run)
    visits = [(step.step, i, n) for step in record.steps for i, n in zip(step.prompt_ids, step.given, strict=True)]
    assert [*zip(found["steps"], found["prompt_ids"], found["rollouts"]["as recorded"], strict=True)] == visits
    asked = ["--allocator", "uniform", "--allocator", "neyman,variance=empirical,half_life=2"]
    assert main(["replay", str(run), "--out", str(tmp_path), *asked]) == 0
    assert list(table(capsys.readouterr().out)) == ["as recorded", *asked[1::2]]


def test_what_is_not_reproduced_is_said_in_one_line(tmp_path, capsys):
    folder = tmp_path / "run"
    write_run(folder)
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("half_life: 8.0", "half_life: 1.0"))
    assert main(["replay", str(folder)]) == 0
    said = re.search(
        r"NOT REPRODUCED: .* at step \d+, prompt 'problem/\d+': (\d+) in allocation.jsonl, (\d+) replayed",
        capsys.readouterr().out,
    )
    assert said[1] != said[2]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--allocator", "nyman"], "algorithm.allocation.kind: 'nyman' is unknown"),
        (["--allocator", "neyman,varience=empirical"], "did you mean algorithm.allocation.variance?"),
        (["--allocator", "uniform,budget=3"], "a replay gives every allocator the budget"),
        (["--allocator", "neyman,rollout_n_min=9"], "64 rollouts for 8 prompts is outside [72, 192]"),
    ],
)
def test_refused(run, tmp_path, capsys, options, says):
    assert says in refused(capsys, run, "--out", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def test_folders_of_something_else(run, tmp_path, capsys):
    (tmp_path / "notes.jsonl").write_text("{}\n")
    assert "no config.yaml, so no run's folder" in refused(capsys, tmp_path)
    assert "name a folder to write to with --out" in refused(capsys, run, "--out", tmp_path / "notes.jsonl")
