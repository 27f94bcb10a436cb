import dataclasses

import numpy as np
import pytest
from stand_ins import rollout, sampled

from dynamo_megatron.rollout.recorded import RecordedRollouts
from dynamo_megatron.rollout.result import group_id, rollout_id
from dynamo_megatron.rollout.store import RolloutStore
from dynamo_megatron.types import Prompt

PROMPTS = {name: Prompt(name, text=name, tokens=[10 + i, 11]) for i, name in enumerate("abc")}
SIZES = [("a", 2), ("b", 7), ("a", 15), ("c", 1)]  # one batch of step 5


@pytest.fixture
def folder(tmp_path):
    """The rollout with reward 100 * position + index is the index-th of the group at that position."""
    store = RolloutStore(tmp_path)
    rollouts = []
    for position, (name, n) in enumerate(SIZES):
        for k in range(n):
            made = {"prompt_id": name, "tokens": [*PROMPTS[name].tokens, 20 + k], "reward": 100.0 * position + k}
            made["finish_reason"] = "length" if k % 2 else "stop"
            rollouts.append(rollout(rollout_id(group_id(5, position), k), [20 + k], **made))
    for index in np.random.default_rng(0).permutation(len(rollouts)):  # they finish in any order
        store.append(rollouts[index])
    return tmp_path


def generate(folder, request, step=5):
    prompts, counts = [PROMPTS[name] for name, _ in request], [n for _, n in request]
    return sampled(RecordedRollouts(folder, 100), step, prompts, counts)


def test_unequal_groups_and_a_prompt_twice(folder):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    result = generate(folder, SIZES)
    expected = [100.0 * position + k for position, (_, n) in enumerate(SIZES) for k in range(n)]
    assert result.batch.rewards.tolist() == expected
    assert result.batch.prompt_ids == [name for name, n in SIZES for _ in range(n)]
    assert result.batch.group_ids[0] == "000005-0000" and result.batch.group_ids[-1] == "000005-0003"
    assert result.counts["requested"] == 25 == result.counts["completed"] + result.counts["truncated"]
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("request_", "step", "message"),
    [
        ([("a", 2)], 6, "step 6 was not recorded"),
        ([("a", 1), ("a", 1), ("a", 1)], 5, "prompt 'a' has 0 recorded rollouts in its group 3 of 2, 1 were asked for"),
        ([("b", 8)], 5, "prompt 'b' has 7 recorded rollouts in its group 1 of 1, 8 were asked for"),
    ],
)
def test_what_was_not_recorded_is_named(folder, request_, step, message):
    with pytest.raises(ValueError, match=message) as error:
        generate(folder, request_, step)
    assert "\n" not in str(error.value)


DAMAGED = "000005-0001-002"


def put(folder, **changes):
    """In the place of a rollout of the record."""
    store = RolloutStore(folder)
    store.append(dataclasses.replace(next(r for r in store.lines(5) if r.rollout_id == DAMAGED), **changes))
    store.close()


@pytest.mark.parametrize(
    ("tokens", "why"), [([9, 11, 22], "of other tokens of prompt 'b'"), ([11, 11, 100], "not in the vocabulary")]
)
def test_a_rollout_of_other_tokens_is_refused_with_its_place_in_one_line(folder, tokens, why):
    put(folder, tokens=tokens)
    with pytest.raises(ValueError, match=why) as error:
        generate(folder, [("b", 4)])
    said, path = str(error.value), folder / "rollouts" / "step-000005.jsonl.zst"
    assert said.startswith(f"{path}: {DAMAGED}: ") and said.isprintable() and len(said) < 400


def test_nan_logprobs_of_a_record_come_to_the_training_which_rejects_them(folder):
    put(folder, engine_logprobs=[float("nan")])
    batch = generate(folder, [("b", 4)]).batch
    assert np.isnan(batch.engine_logprobs).tolist() == [False, False, True, False]
