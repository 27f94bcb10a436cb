"""What passes for a response of a server."""

import math

import pytest

from dynamo_megatron.rollout.validation import response_fault

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
