"""What each kind of allocator optimises, by hand."""

import json
from dataclasses import replace

import numpy as np
import pytest
from recorded import recorded_step, write_run

from dynamo_megatron.cli import main
from dynamo_megatron.replay import what_if
from dynamo_megatron.replay.allocators import parse_allocator
from dynamo_megatron.replay.objectives import Objectives
from dynamo_megatron.replay.recording import read_run
from dynamo_megatron.types import EpisodeRecord

STEP = replace(
    recorded_step(1, ["a", "b"], [4, 2], [[1, 0, 0, 0], [1, 1]]),
    energy=np.array([1.0, 4.0, 4.0, 4.0, 9.0, 9.0]),
    lengths=np.array([10, 20, 20, 20, 8, 12]),
)


def objectives(steps, counts, gradients=None):
    return Objectives(steps, what_if.success_rates(steps), gradients or {}).of(np.array(counts))


def test_by_hand():
    found = objectives([STEP], [2, 3], {"b": 0.9, "c": 7.0})
    want = {
        "gradient": 0.9 / 3,  # of "a" nothing was measured
        "energy": (0.25 * 0.75**2 * 1 + 0.25**2 * 0.75 * 4) / 2,  # of "b", always right, nothing
        "tokens": 2 * (70 + 4 * 15) / 8 + 3 * (20 + 4 * 15) / 6,  # shrunk to the mean of 15
        "knapsack": (1 - 0.25**2 - 0.75**2) * 0.25 * 0.75**2,
        "cero": 0.1875 / 3,
        "gvm": 1 / (0.25 + 0.001 / 0.25) / 2 + 9 / (1 + 0.001) / 3,
        "cures": 0.1875 * (0.75 * 1 + 0.25 * 2) ** 2 / 2,
    }
    assert found == pytest.approx(want, rel=1e-12)
    assert objectives([STEP, STEP], [2, 3, 4, 1])["cero"] == pytest.approx(0.1875 / 7), "of the whole record"


def test_what_a_record_does_not_have_is_none():
    bare = replace(STEP, energy=None, lengths=None)
    found = objectives([bare], [2, 2])
    assert [name for name, value in found.items() if value is None] == ["gradient", "energy", "tokens", "gvm", "cures"]


def test_energies_and_lengths_come_from_the_servers_logprobs(tmp_path):
    write_run(tmp_path / "run", steps=2)
    for step in read_run(tmp_path / "run").steps:
        assert step.energy == pytest.approx(np.full(len(step.rewards), (1 - np.exp(-1)) ** 2))
        assert step.lengths.tolist() == [1] * len(step.rewards)


@pytest.mark.parametrize("allocation", [{"variance": "energy"}, {"cost": "tokens"}])
def test_a_run_whose_energies_or_prices_are_not_recorded_is_not_checked(allocation, tmp_path, capsys):
    write_run(tmp_path / "run", steps=3, allocation=allocation)
    assert main(["replay", str(tmp_path / "run"), "--allocator", "gvm"]) == 0
    text = capsys.readouterr().out
    assert "REPRODUCED" not in text and "own allocator" not in text and "| as recorded (neyman) |" in text
    section = text.split("## What each of them optimises")[1].split("\n## ")[0]
    assert "| uniform |" not in section and "Energies are from the server's logprobs" in section
    assert len([line for line in section.splitlines() if line.startswith("| gvm |")]) == 1


def test_an_episodes_length_is_what_was_sampled_in_it(tmp_path, capsys):
    """Three answers in two segments, 4 tokens of 9; the table has what allocators would have spent."""
    answered = {"tokens": list(range(9)), "response_mask": [0, 1, 0, 1, 0, 0, 1, 1, 0], "engine_logprobs": [-1.0] * 4}
    answered |= {"weight_versions": [(0, 0, 4)], "episode": EpisodeRecord([0, 4], {"turns": 3, "segments": 2})}
    write_run(tmp_path / "run", steps=3, allocation={"cost": "tokens"}, answered=answered)
    record = read_run(tmp_path / "run")
    assert all(step.lengths.tolist() == [4] * len(step.rewards) for step in record.steps)
    counts = np.concatenate([step.given for step in record.steps])
    assert objectives(record.steps, counts)["tokens"] == pytest.approx(4 * counts.sum())
    assert main(["replay", str(tmp_path / "run"), "--allocator", "neyman,cost=tokens"]) == 0
    section = capsys.readouterr().out.split("## What each of them optimises")[1]
    assert "tokens" in section and "| neyman,cost=tokens |" in section


def test_measured_gradients_are_read_from_the_runs_folder(tmp_path, capsys):
    """Of the prompts of the first step alone, all alike: the figure is that of 1/n over their visits."""
    write_run(tmp_path / "run", steps=6)
    known = read_run(tmp_path / "run").steps[0].prompt_ids
    lines = [json.dumps({"prompt_id": prompt_id, "variance": 0.5}) + "\n" for prompt_id in known]
    (tmp_path / "run" / "gradients.jsonl").write_text("".join(lines))
    assert main(["replay", str(tmp_path / "run")]) == 0
    record, found = read_run(tmp_path / "run"), json.loads((tmp_path / "run" / "replay.json").read_text())
    measured = np.isin(record.prompt_ids, known)
    given, uniform = (what_if.replay(record.steps, parse_allocator(kind, record)) for kind in ("neyman", "uniform"))
    of = {name: m["objectives_to_uniform"]["gradient"] for name, m in found["allocators"].items()}
    assert of["uniform"] == 1 and measured.any() and not measured.all()
    wanted = (1 / given[measured]).sum() / (1 / uniform[measured]).sum()
    assert of["as recorded (neyman)"] == pytest.approx(wanted) and wanted != 1
