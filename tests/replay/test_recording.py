"""A run's record: what was observed in training, whatever a kill, a copy or recorded rollouts made of its folder."""

import json

import numpy as np
import pytest
import yaml
from recorded import write_run

from dynamo_megatron.replay import what_if
from dynamo_megatron.replay.recording import RecordedStep, read_run
from dynamo_megatron.rollout.store import step_file
from dynamo_megatron.runtime.line_files import compressed, read_raw_lines


@pytest.mark.parametrize(
    "allocation",
    [
        {},
        {"variance": "empirical", "half_life": 3.0},
        {"kind": "waterfill", "power": "sigma2"},
        {"budget": 300, "on_shortfall": "scale"},
    ],
    ids=str,
)
def test_a_replay_of_the_runs_allocator_gives_its_own_counts(tmp_path, allocation):
    config = write_run(tmp_path / "run", allocation=allocation)
    record = read_run(tmp_path / "run")
    assert any(len(set(step.prompt_ids)) < 8 for step in record.steps), "no prompt twice in a step"
    assert any(len(step.dispatch) < step.budget for step in record.steps), "no failed rollout"
    counts = what_if.replay(record.steps, what_if.allocator_of(record))
    assert what_if.first_difference(record.steps, counts) is None
    assert len(counts) == 12 * 8
    if allocation.get("kind") != "uniform" and "budget" not in allocation:
        assert len(np.unique(counts)) > 3
    assert {step.budget for step in record.steps} == {config.rollout_budget}


def test_energies_are_of_the_run_s_aggregation(tmp_path):
    found = []
    for name in ("prompt_mean", "sequence_mean"):
        write_run(tmp_path / name, steps=1)
        file = tmp_path / name / "config.yaml"
        plain = yaml.safe_load(file.read_text())
        plain["algorithm"]["loss"]["aggregation"] = name
        file.write_text(yaml.safe_dump(plain))
        found.append(read_run(tmp_path / name).steps[0].energy)
    assert set(np.round(found[0] / found[1], 6)) == {1.0, 4.0, 9.0}  # of responses of 1 to 3 tokens


def test_success_rates_are_of_the_whole_record():
    """Of a: 1 of 4 right, of b: 1 of 2; of c nothing ever came."""

    def step(number, ids, dispatch, right):
        none = np.zeros(len(ids), np.int64)
        return RecordedStep(number, ids, none, np.array(dispatch), np.array(right, float), np.array(right, bool))

    steps = [step(1, ["a", "b"], [0, 0, 0, 1, 1], [1, 0, 0, 1, 0]), step(2, ["c", "a", "a"], [1], [0])]
    assert what_if.success_rates(steps).tolist() == [0.25, 0.5, 2 / 6, 0.25, 0.25]


def test_what_a_kill_tore_is_left_out(tmp_path):
    write_run(tmp_path, steps=5)
    path = tmp_path / "allocation.jsonl"
    path.write_bytes(path.read_bytes()[:-5])  # the last line
    torn = compressed(b'{"rollout_id": "000006-0000-000"}\n')[:-3]
    step_file(tmp_path, 6).write_bytes(torn)
    with step_file(tmp_path, 4).open("ab") as file:
        file.write(torn)
    record = read_run(tmp_path)
    assert [step.step for step in record.steps] == [1, 2, 3, 4]
    assert record.notes == ["Step 5 is left out: a kill tore its allocation."]
    assert what_if.first_difference(record.steps, what_if.replay(record.steps, what_if.allocator_of(record))) is None


def test_a_run_on_recorded_rollouts(tmp_path):
    """It asked for the first 3 of each group of another run, whose folder has the rollouts."""
    write_run(tmp_path / "live", steps=4, allocation={"kind": "uniform"})
    folder = tmp_path / "again"
    folder.mkdir()
    config = yaml.safe_load((tmp_path / "live" / "config.yaml").read_text())
    config["rollout"] |= {"engine": "recorded", "recorded": str(tmp_path / "live")}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    rows = [json.loads(line) for line in (tmp_path / "live" / "allocation.jsonl").read_text().splitlines()]
    (folder / "allocation.jsonl").write_text("".join(json.dumps(row | {"n": 3}) + "\n" for row in rows))
    live, again = read_run(tmp_path / "live"), read_run(folder)
    for whole, part in zip(live.steps, again.steps, strict=True):
        assert part.prompt_ids == whole.prompt_ids and part.budget == 24
        for i in range(8):
            # A failed one among the first three makes a group shorter, never another one longer.
            mine, all_ = part.rewards[part.dispatch == i].tolist(), whole.rewards[whole.dispatch == i].tolist()
            assert mine == all_[: len(mine)] and len(mine) <= 3


def test_what_is_missing_is_one_line(tmp_path):
    write_run(tmp_path, steps=3)
    path = step_file(tmp_path, 2)
    path.write_bytes(b"".join(map(compressed, list(read_raw_lines(path))[1:])))
    with pytest.raises(
        ValueError, match=r"step-000002.jsonl.zst: \d+ rollouts of prompt 'problem/\d+', allocation.jsonl says"
    ):
        read_run(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match=r"step-000002.jsonl.zst: no such file; a replay needs"):
        read_run(tmp_path)
    (tmp_path / "allocation.jsonl").unlink()
    with pytest.raises(ValueError, match=r"no step in allocation.jsonl; a replay needs at least one finished step"):
        read_run(tmp_path)
