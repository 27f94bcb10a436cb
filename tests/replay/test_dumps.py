"""The dumps of verl and slime, written as their trainers write them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dynamo_megatron.replay.recording import read_record


def write_verl(folder: Path, step: int, rows: list[tuple[str, float]], **columns) -> None:
    """As `RayPPOTrainer._dump_generations`: a row a response, in the order of the balanced batch."""
    folder.mkdir(exist_ok=True)
    lines = [
        json.dumps({"input": x, "output": "y", "gts": "z", "score": score, "step": step, **columns})
        for x, score in rows
    ]
    (folder / f"{step}.jsonl").write_text("\n".join(lines) + "\n")


def write_slime(folder: Path, number: int, samples: list[dict], name: str = "data_{rollout_id}.pt") -> Path:
    """As `save_debug_rollout_data`, of `Sample.to_dict`."""
    folder.mkdir(exist_ok=True)
    path = folder / name.format(rollout_id=number)
    usual = {"response": "y", "label": "z", "tokens": [1, 2], "status": "completed", "metadata": {}, "loss_mask": None}
    torch.save({"rollout_id": number, "samples": [{**usual, "index": i, **s} for i, s in enumerate(samples)]}, path)
    return path


def test_verl(tmp_path):
    write_verl(tmp_path, 10, [("user\nq2", 1.0), ("user\nq1", 0.0), ("user\nq2", -1.0), ("user\nq2", 0.5)])
    write_verl(tmp_path, 9, [("user\nq1", 1), ("user\nq1", 2.0)])
    record = read_record(tmp_path)
    assert [step.step for step in record.steps] == [9, 10]
    first, second = record.steps
    assert first.given.tolist() == [2] and first.successes.all()
    assert second.given.tolist() == [3, 1] and second.dispatch.tolist() == [0, 1, 0, 0]
    assert second.rewards.tolist() == [1, 0, -1, 0.5] and second.successes.tolist() == [True, False, False, False]
    assert first.prompt_ids == ["user\nq1"] and second.prompt_ids == ["user\nq2", "user\nq1"]
    assert read_record(tmp_path, 0.5).steps[1].successes.tolist() == [True, False, False, True]


def test_slime(tmp_path):
    chat = [{"role": "user", "content": "q1"}]
    write_slime(
        tmp_path,
        3,
        [
            {"prompt": "q2", "group_index": 7, "reward": 1.0},
            {"prompt": chat, "group_index": 5, "reward": 0},
            {"prompt": "q2", "group_index": 6, "reward": 0.0},  # drawn twice
            {"prompt": "q2", "group_index": 7, "reward": None, "status": "aborted"},
        ],
    )
    write_slime(tmp_path, 2, [{"prompt": chat, "group_index": None, "reward": 1.0}] * 2)
    write_slime(
        tmp_path, 3, [{"prompt": "held out", "group_index": 0, "reward": 1.0}], name="data_eval_{rollout_id}.pt"
    )
    record = read_record(tmp_path)
    assert [step.step for step in record.steps] == [2, 3]
    first, second = record.steps
    assert first.given.tolist() == [2]
    assert second.given.tolist() == [2, 1, 1]
    assert second.dispatch.tolist() == [0, 1, 2] and second.rewards.tolist() == [1, 0, 0]
    assert first.prompt_ids == [json.dumps(chat)] and second.prompt_ids == ["q2", json.dumps(chat), "q2"]


def test_rewards_of_slime_that_are_several(tmp_path):
    write_slime(tmp_path, 0, [{"prompt": "q", "reward": {"acc": True, "score": -1.0}}])
    with pytest.raises(ValueError, match=r"sample 0: its reward is \['acc', 'score'\]; name one .* --reward-key$"):
        read_record(tmp_path)
    assert read_record(tmp_path, 1.0, "score").steps[0].rewards.tolist() == [-1.0]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"output": "q", "score": 1}', r"7.jsonl:1: no 'input'"),
        ('{"input": "q", "score": NaN}', r"7.jsonl:1: 'score' is nan, not a finite number"),
        ("", r"no rollout of step 7 has a reward"),
    ],
)
def test_a_broken_line_of_verl_is_named(tmp_path, line, says):
    (tmp_path / "7.jsonl").write_text(line and line + "\n")
    with pytest.raises(ValueError, match=says):
        read_record(tmp_path)


def test_a_broken_file_of_slime_is_named(tmp_path):
    """What is not among the types that torch.load may make."""
    write_slime(tmp_path, 0, [{"prompt": "q", "reward": 1.0, "routed": np.arange(3)}])
    with pytest.raises(ValueError, match=r"data_0.pt: no dump of slime's .*\)$"):
        read_record(tmp_path)
