"""An agent's rollout on the page: whose words, and which tokens."""

import itertools

from dynamo_megatron.reports.page.episodes import MOST_TEXT, episode_view
from dynamo_megatron.reports.page.rollouts import Shown, rollout_view
from dynamo_megatron.types import EpisodeRecord, TurnRecord

CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
MESSAGES = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "It is 2."},
]
# Two answers of the conversation in one segment, then two of another one.
TOKENS = [20, 21, 30, 31, 22, 32, 23, 24, 40, 25, 41, 42]
MASK = [0, 0, 1, 1, 0, 1, 0, 0, 1, 0, 1, 1]
TURNS = [
    TurnRecord(2, 4, 0.0, 0.5, 1),
    TurnRecord(8, 9, 0.1, 0.6, None),
    TurnRecord(10, 12, 0.7, 0.9, None),
    TurnRecord(5, 6, 1.0, 1.25, 3),
]


def decode(ids) -> str:
    return " ".join(map(str, ids))


def made(new_rollout, messages=MESSAGES, turns=TURNS, **fields):
    record = EpisodeRecord([0, 6], {"turns": 4, "segments": 2}, messages, turns=turns)
    more = {"tokens": TOKENS, "response_mask": MASK, "engine_logprobs": [-1.0] * 6, "weight_versions": [(0, 0, 6)]}
    return new_rollout(1, 0, 0, episode=record, **{**more, **fields})


def test_who_said_what_and_which_tokens(new_rollout):
    view = episode_view(made(new_rollout), decode)
    assert [(m["role"], m["turn"]) for m in view["conversation"]] == [
        *(("user", None), ("assistant", 0), ("tool", None), ("assistant", 3))
    ]
    assert view["conversation"][1]["text"] == '{"name": "add", "arguments": {"a": 1}}'
    ids = [token for token, trained in zip(TOKENS, MASK, strict=True) if trained]
    said = [ids[turn["first"] : turn["first"] + turn["count"]] for turn in view["turns"]]
    assert said == [[30, 31], [40], [41, 42], [32]]
    assert [turn["asked"] for turn in view["turns"]] == [0.0, 0.1, 0.7, 1.0]
    assert [turn["answered"] for turn in view["turns"]] == [0.5, 0.6, 0.9, 1.25]
    assert view["others"] == [
        {"turn": 1, "segment": 1, "before": "23 24"},
        {"turn": 2, "segment": 1, "before": "25"},
    ]
    assert view["counts"] == {"turns": 4, "segments": 2}


def test_without_a_tokenizer_or_messages_or_answers(new_rollout):
    assert episode_view(new_rollout(1, 0, 0), decode) is None
    assert [other["before"] for other in episode_view(made(new_rollout), None)["others"]] == ["", ""]
    turns = [turn._replace(message=None) for turn in TURNS]
    of_ids = episode_view(made(new_rollout, messages=None, turns=turns), decode)
    assert of_ids["conversation"] == [] and [other["turn"] for other in of_ids["others"]] == [0, 1, 2, 3]
    failed = made(new_rollout, turns=[], tokens=[20], response_mask=[0], engine_logprobs=[], weight_versions=[])
    assert [m["turn"] for m in episode_view(failed, decode)["conversation"]] == [None] * 4


def test_a_long_message_keeps_both_ends(new_rollout):
    long = [{"role": "user", "content": "a" * MOST_TEXT + "z" * MOST_TEXT}]
    (message,) = episode_view(made(new_rollout, messages=long, turns=[]), decode)["conversation"]
    half = MOST_TEXT // 2
    assert message["text"] == "a" * half + f"\n[cut: {MOST_TEXT:,} characters]\n" + "z" * half


def test_no_character_has_tokens_of_two_answers(new_rollout):
    """The bytes of one character: 30 ends an answer, 31 begins the next."""

    def of_bytes(ids) -> str:
        return bytes({30: 0xC3, 31: 0xB6}.get(i, i) for i in ids).decode("utf-8", "replace")

    turns = [TurnRecord(1, 2, 0.0, 0.1, 1), TurnRecord(3, 4, 0.2, 0.3, 3)]
    record = EpisodeRecord([0], {"turns": 2}, MESSAGES, turns=turns)
    fields = {"tokens": [65, 30, 66, 31], "response_mask": [0, 1, 0, 1], "episode": record}
    view = rollout_view(Shown(new_rollout(1, 0, 0, **fields), [], None), of_bytes)
    assert view["ids"] == [30, 31] and view["texts"] == ["\ufffd", "\ufffd"]
    firsts = [turn["first"] for turn in view["episode"]["turns"]]
    assert all(a < b for a, b in itertools.pairwise(firsts))
