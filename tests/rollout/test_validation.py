"""What passes for a response, of a server or of a file."""

import dataclasses
import math

import pytest
from stand_ins import rollout

from dynamo_megatron.rollout.validation import response_fault, rollout_fault
from dynamo_megatron.types import EpisodeRecord, TurnRecord

SOUND = {
    "tokens": [7, 0, 99],
    "logprobs": [-1.5, 0.0, -2],
    "weight_versions": [(3, 0, 2), (4, 2, 3)],
    "finish_reason": "stop",
}
FAULTS = {
    "no tokens": {"tokens": [], "logprobs": [], "weight_versions": []},
    "one too many": {"tokens": [7] * 5, "logprobs": [-1.0] * 5, "weight_versions": [(0, 0, 5)]},
    "beyond the vocabulary": {"tokens": [7, 100, 1]},
    "negative": {"tokens": [7, -1, 1]},
    "text": {"tokens": [7, "8", 1]},
    "a logprob less": {"logprobs": [-1.0, -1.0]},
    "a logprob above 0": {"logprobs": [-1.0, 0.01, -1.0]},
    "nan": {"logprobs": [-1.0, math.nan, -1.0]},
    "beyond float32": {"logprobs": [-1.0, -1e308, -1.0]},
    "aborted": {"finish_reason": "abort"},
    "a gap": {"weight_versions": [(3, 0, 1), (4, 2, 3)]},
    "short": {"weight_versions": [(3, 0, 2)]},
    "a version below -1": {"weight_versions": [(-2, 0, 3)]},
    "a version in text": {"weight_versions": [("3", 0, 3)]},
}


def fault(**changes) -> str:
    return response_fault(SOUND | changes, vocab_size=100, max_new_tokens=4)


def test_what_is_sound_passes():
    assert fault() == ""
    assert fault(logprobs=[1e-6, -3.3e38, 0]) == ""
    assert fault(weight_versions=[[-1, 0, 3]], finish_reason="length") == ""


@pytest.mark.parametrize("changes", FAULTS.values(), ids=FAULTS.keys())
def test_what_is_not_sound_is_named_in_one_short_line(changes):
    said = fault(**changes)
    assert said and said.isprintable() and len(said) < 200


ROLLOUT = rollout("000001-0000-000", (7, 8))
EPISODE = dataclasses.replace(
    ROLLOUT,
    tokens=[5, 6, 7, 8, 5, 9, 8],
    response_mask=[0, 1, 0, 1, 0, 0, 1],
    engine_logprobs=[-1.0] * 3,
    weight_versions=[(1, 0, 2), (0, 2, 3)],
    episode=EpisodeRecord([0, 4], {"turns": 3}, [], [{}], [TurnRecord(1, 2, 0.0, 0.5), TurnRecord(3, 4, 1.0, 2)]),
)


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        (ROLLOUT, {"response_mask": [0, 1, 0, 1]}),
        (ROLLOUT, {"response_mask": [0, 0, 1]}),
        (ROLLOUT, {"tokens": [5, 6, 7, 100]}),
        (ROLLOUT, {"reward": math.nan}),
        (ROLLOUT, {"reward": -1.1e18}),
        (ROLLOUT, {"step_rewards": [(0, 3, 1.0)]}),
        (ROLLOUT, {"engine_logprobs": [-1.0]}),
        (EPISODE, {"response_mask": [1, 1, 0, 1, 0, 0, 1]}),
        (EPISODE, {"response_mask": [0, 1, 0, 1, 0, 0, 2]}),
        (EPISODE, {"tokens": [5, 6, 100, 8, 5, 9, 8]}),
        (EPISODE, {"episode": EpisodeRecord([], {})}),
        (EPISODE, {"episode": EpisodeRecord([0, 7], {})}),
        (EPISODE, {"episode": EpisodeRecord([0, 3], {})}),
    ],
    ids=str,
)
def test_a_rollout_of_a_file_is_held_to_the_same(base, changes):
    assert rollout_fault(base, vocab_size=100, max_new_tokens=4) == ""
    assert rollout_fault(dataclasses.replace(base, **changes), vocab_size=100, max_new_tokens=4)
