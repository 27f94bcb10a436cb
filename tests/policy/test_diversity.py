"""`algorithm.advantage.diversity` in the batch that is trained on."""

import dataclasses

import numpy as np
import pytest
from background_run import made_rollout

from dynamo_megatron.algorithm.diversity import diversity_factors
from dynamo_megatron.config import Config
from dynamo_megatron.policy.batch import TrainBatch
from dynamo_megatron.types import Rollout, RolloutBatch

# (position of the group in the step, right, answer, response)
ROWS = [
    *((0, True, "7", [5, 6, 7, 8, 9]), (1, True, "7", [5, 6, 7, 8, 9]), (0, True, "7", [1, 6, 7, 8, 9])),
    *((0, True, "9", [5, 6, 7, 8, 9]), (1, False, "3", [5]), (0, False, "3", [5, 6]), (1, True, "7", [2, 3, 4, 5, 6])),
    (0, True, "7", [5, 6, 7, 8, 9]),
]


def rollouts() -> list[Rollout]:
    """Groups of one prompt that are interleaved."""
    made = []
    for k, (place, right, answer, response) in enumerate(ROWS):
        fields = {"right": right, "engine_logprobs": [-1.0] * len(response), "extracted": answer}
        made.append(made_rollout(1, place, k, "p", [1], response, **fields))
    return made


def configured(**advantage) -> Config:
    sections = {"model": {"path": "m"}, "data": {"source": "d"}, "output_dir": "o", "rollout": {"max_new_tokens": 8}}
    return Config(**sections, algorithm={"advantage": advantage, "modulation": None})


@pytest.mark.parametrize("advantage", [{"kind": "rloo"}, {"kind": "grpo"}, {"kind": "history", "score_ratio": 2}])
def test_positive_advantages_of_right_rollouts_are_scaled_within_their_groups(advantage):
    batch = RolloutBatch.from_rollouts(rollouts())
    plain = TrainBatch.build(batch, configured(**advantage)).advantages
    scaled = TrainBatch.build(batch, configured(**advantage, diversity=0.5)).advantages
    answers, tokens = [row[2] for row in ROWS], np.concatenate([row[3] for row in ROWS])
    given = (batch.successes, answers, tokens, batch.response_lengths, batch.group_ids)
    np.testing.assert_array_equal(scaled, plain * diversity_factors(0.5, *given))
    assert scaled[3] > scaled[2] > scaled[0]  # another answer, another path, neither
    for group in set(batch.group_ids):  # the advantages of a group have the same sum as without
        here = [g == group for g in batch.group_ids]
        assert scaled[here].sum() == pytest.approx(plain[here].sum(), abs=1e-12)


def test_a_negative_advantage_stays_as_it_is():
    batch = RolloutBatch.from_rollouts(rollouts())
    batch = dataclasses.replace(batch, rewards=np.array([0.8, 0.5, 0.9, 0.7, 0.0, 0.0, 0.5, 0.1]))
    plain, scaled = (TrainBatch.build(batch, configured(diversity=w)).advantages for w in (0.0, 1.0))
    below = (plain < 0) & batch.successes
    assert np.flatnonzero(below).tolist() == [7] and scaled[7] == plain[7] and (scaled != plain).any()


def test_recorded_rollouts_and_any_parts_of_a_step_give_the_same_advantages():
    made, config = rollouts(), configured(diversity=1.0)
    whole = TrainBatch.build(RolloutBatch.from_rollouts(made), config).advantages
    recorded = [Rollout.from_json(rollout.to_json()) for rollout in made]
    parts = RolloutBatch.join([RolloutBatch.from_rollouts([rollout]) for rollout in recorded])
    assert TrainBatch.build(parts, config).advantages.tobytes() == whole.tobytes()
    left = np.array([0, 2, 3, 5, 7])  # group 0
    np.testing.assert_array_equal(TrainBatch.build(parts.take(left), config).advantages, whole[left])


def test_without_an_extracted_answer_the_text_is_the_answer_and_without_text_the_tokens():
    bare = [dataclasses.replace(r, extracted=None) for r in rollouts()]
    ids = [
        dataclasses.replace(bare[0], response=text).answer_id for text in ("Two  words", "two words\n", "two, words")
    ]
    assert ids[0] == ids[1] != ids[2] and len({r.answer_id for r in bare}) == 5
