"""What passes for a response, of a server or of a file."""

import dataclasses
import math
import time

import pytest

from dynamo_megatron.errors import InputError
from dynamo_megatron.rollout.validation import response_fault, rollout_fault, type_fault
from dynamo_megatron.types import EpisodeRecord, Rollout, TurnRecord

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
    "2 ** 40": {"tokens": [7, 2**40, 1]},
    "40 digits": {"tokens": [7, int("9" * 40), 1]},
    "text": {"tokens": [7, "8", 1]},
    "null": {"tokens": [7, None, 1]},
    "float": {"tokens": [7, 8.0, 1]},
    "bool": {"tokens": [7, True, 1]},
    "list": {"tokens": [7, [8], 1]},
    "tokens of another kind": {"tokens": "789"},
    "a logprob less": {"logprobs": [-1.0, -1.0]},
    "logprobs of another kind": {"logprobs": {"a": 1}},
    "a logprob above 0": {"logprobs": [-1.0, 0.01, -1.0]},
    "nan": {"logprobs": [-1.0, math.nan, -1.0]},
    "inf": {"logprobs": [-1.0, -math.inf, -1.0]},
    "beyond float32": {"logprobs": [-1.0, -1e308, -1.0]},
    "a logprob of 40 digits": {"logprobs": [-1.0, -int("9" * 40), -1.0]},
    "a logprob of 4,000 digits": {"logprobs": [-1.0, -(10**4000), -1.0]},
    "no logprob": {"logprobs": [-1.0, None, -1.0]},
    "a true logprob": {"logprobs": [-1.0, False, -1.0]},
    "a text for a logprob": {"logprobs": [-1.0, "-1.0", -1.0]},
    "an end of another name": {"finish_reason": "tired"},
    "an end of another kind": {"finish_reason": [1]},
    "aborted": {"finish_reason": "abort"},
    "no spans": {"weight_versions": []},
    "a gap": {"weight_versions": [(3, 0, 1), (4, 2, 3)]},
    "twice": {"weight_versions": [(3, 0, 2), (4, 1, 3)]},
    "late": {"weight_versions": [(3, 1, 3)]},
    "short": {"weight_versions": [(3, 0, 2)]},
    "long": {"weight_versions": [(3, 0, 2**40)]},
    "backwards": {"weight_versions": [(3, 0, 3), (4, 3, 2)]},
    "a version of 40 digits": {"weight_versions": [(int("9" * 40), 0, 3)]},
    "a version below -1": {"weight_versions": [(-2, 0, 3)]},
    "a version in text": {"weight_versions": [("3", 0, 3)]},
    "a true start": {"weight_versions": [(3, False, 3)]},
    "a pair": {"weight_versions": [(3, 0)]},
    "spans of another kind": {"weight_versions": 3},
    "span of another kind": {"weight_versions": [None]},
}


def fault(**changes) -> str:
    return response_fault(**SOUND | changes, vocab_size=100, max_new_tokens=4)


def test_what_is_sound_passes():
    assert fault() == ""
    assert fault(logprobs=[1e-6, -3.3e38, 0]) == ""
    assert fault(weight_versions=[[-1, 0, 3]], finish_reason="length") == ""


@pytest.mark.parametrize("changes", FAULTS.values(), ids=FAULTS.keys())
def test_what_is_not_sound_is_named_in_one_short_line(changes):
    said = fault(**changes)
    assert said and said.isprintable() and len(said) < 200


def test_a_long_response_costs_little():
    tokens = [7] * 32_768
    started = time.process_time()
    said = response_fault(tokens, [-1.0] * 32_768, [(0, 0, 32_768)], "stop", vocab_size=100, max_new_tokens=32_768)
    assert said == "" and time.process_time() - started < 0.2


ROLLOUT = Rollout(
    "000001-0000-000",
    "000001-0000",
    "p",
    1,
    [5, 6, 7, 8],
    [0, 0, 1, 1],
    [-1.0, -1.0],
    [(0, 0, 2)],
    "stop",
    1.0,
    True,
    {},
)


@pytest.mark.parametrize(
    "changes",
    [
        {"response_mask": [0, 1, 0, 1]},
        {"response_mask": [0, 0, 1]},
        {"response_mask": None},
        {"response_mask": [0, 0, 0, 0]},
        {"tokens": None},
        {"tokens": [5, 6, 7, 100]},
        {"reward": math.nan},
        {"reward": -1.1e18},
        {"reward": None},
        {"reward": 10**4000},
        {"success": 1},
        {"server": ["server-0"]},
        {"engine_logprobs": [-1.0]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_rollout_of_a_file_is_held_to_the_same(changes):
    assert rollout_fault(ROLLOUT, vocab_size=100, max_new_tokens=4) == ""
    assert rollout_fault(dataclasses.replace(ROLLOUT, **changes), vocab_size=100, max_new_tokens=4)


EPISODE = dataclasses.replace(
    ROLLOUT,
    tokens=[5, 6, 7, 8, 5, 9, 8],
    response_mask=[0, 1, 0, 1, 0, 0, 1],
    engine_logprobs=[-1.0] * 3,
    weight_versions=[(1, 0, 2), (0, 2, 3)],
    episode=EpisodeRecord(
        [0, 4], {"turns": 3}, [], [{}], [TurnRecord(1, 2, 0.0, 0.5, None), TurnRecord(3, 4, 1.0, 2, 1)]
    ),
)


@pytest.mark.parametrize(
    "changes",
    [
        {"response_mask": [1, 1, 0, 1, 0, 0, 1]},
        {"response_mask": [0, 1, 0, 1, 0, 0, 2]},
        {"response_mask": [0, 1, 0, 1, 0, 0, 0]},
        {"response_mask": [0, 1, 0, 1, 0, 0]},
        {"tokens": [5, 6, 100, 8, 5, 9, 8]},
        {"tokens": [5, 6, None, 8, 5, 9, 8]},
        {"episode": EpisodeRecord([], {})},
        {"episode": EpisodeRecord([1, 4], {})},
        {"episode": EpisodeRecord([0, 7], {})},
        {"episode": EpisodeRecord([0, 3], {})},
        {"episode": EpisodeRecord([0, 4, 4], {})},
        {"episode": EpisodeRecord([0, True], {})},
        {"episode": EpisodeRecord(None, {})},
        {"engine_logprobs": [-1.0] * 4},
    ],
    ids=str,
)
def test_an_episode_of_a_file_is_held_to_the_same(changes):
    assert rollout_fault(EPISODE, vocab_size=100, max_new_tokens=4) == ""
    assert rollout_fault(dataclasses.replace(EPISODE, **changes), vocab_size=100, max_new_tokens=4)
    assert rollout_fault(EPISODE, vocab_size=100, max_new_tokens=2)


@pytest.mark.parametrize(
    "record",
    [
        EpisodeRecord("0", {}),
        EpisodeRecord([0], {"turns": "3"}),
        EpisodeRecord([0], {}, "hello"),
        EpisodeRecord([0], {}, ["hello"]),
        EpisodeRecord([0], {}, [{"role": "user", "content": None}]),
        EpisodeRecord([0], {}, [{"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}]),
        EpisodeRecord([0], {}, tools="add"),
        EpisodeRecord([0], {}, tools=["add"]),
        EpisodeRecord([0], {}, turns=[TurnRecord("0", 1, 0.0, 1.0, None)]),
        EpisodeRecord([0], {}, turns=[TurnRecord(0, 1, None, 1.0, None)]),
        EpisodeRecord([0], {}, turns=[TurnRecord(0, 1, 0.0, 1.0, -1)]),
    ],
    ids=str,
)
def test_what_an_episode_has_is_of_its_types(record):
    assert type_fault(EPISODE) == ""
    assert type_fault(dataclasses.replace(EPISODE, episode=record)).startswith("episode ")


@pytest.mark.parametrize("turns", [5, [[1, 2]], [None]])
def test_an_episode_is_read_as_it_was_written(turns):
    assert Rollout.from_json(EPISODE.to_json()) == EPISODE
    broken = dataclasses.replace(EPISODE, episode=EpisodeRecord([0], {}, turns=turns))
    with pytest.raises(InputError, match="not a rollout"):
        Rollout.from_json(broken.to_json())
