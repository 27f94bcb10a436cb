"""Steps from the characters of a response to its tokens, to the rollout file and back."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
from agents_chat import byte_level
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_ins import Server, generated, rollout, sampled
from tokenizers import Tokenizer

from dynamo_megatron.rollout.recorded import RecordedRollouts
from dynamo_megatron.rollout.step_session import StepSession, wanted_rollouts
from dynamo_megatron.rollout.store import RolloutStore, read_rollouts, step_file
from dynamo_megatron.rollout.token_spans import character_ends, token_spans
from dynamo_megatron.types import EpisodeRecord, Prompt, RolloutBatch

BYTES = byte_level("<end>")


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def test_by_hand():
    tokenizer, text = byte_level("<end>", merges=[("=", "4")]), "2+2=4 é\n🙂."
    tokens = [*encoded(tokenizer, text), tokenizer.token_to_id("<end>")]
    # 2, +, 2, =4, blank, é (2 bytes), line end, 🙂 (4 bytes), ., end
    assert character_ends(tokens, tokenizer.decode) == [1, 2, 3, 5, 6, 6, 7, 8, 8, 8, 8, 9, 10, 10]
    steps = [(0, 4, 0.5), (4, 7, 1.0), (8, 9, 2.0), (9, 10, -1.0)]  # the first two share =4
    decode = functools.partial(tokenizer.decode, skip_special_tokens=True)
    assert token_spans(steps, tokens, text, decode) == [(0, 4, 0.5), (3, 7, 1.0), (8, 12, 2.0), (12, 14, -1.0)]


@settings(deadline=None)  # a busy machine
@given(st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=60))
def test_every_character_comes_with_its_last_byte(text):
    ends = character_ends(encoded(BYTES, text), BYTES.decode)
    sizes = [len(character.encode()) for character in text]
    assert [ends.index(k) + 1 for k in range(1, len(text) + 1)] == list(itertools.accumulate(sizes))


@settings(deadline=None)  # a busy machine
@given(st.lists(st.integers(0, 256), max_size=40))
def test_bytes_that_are_no_text_keep_every_step_within_the_response(tokens):
    text = BYTES.decode(tokens)
    steps = [(k, k + 1, 1.0) for k in range(len(text))]
    spans = token_spans(steps, tokens, text, BYTES.decode)
    assert all(0 <= start < end <= len(tokens) for start, end, _ in spans)
    ends = [end for _, end, _ in spans]
    assert ends == sorted(ends) and (not spans or ends[-1] == len(tokens))


WITH = rollout("000005-0000-000", (3, 4, 5), step_rewards=[(0, 1, 0.1), (1, 3, -2.0)])
WITHOUT = rollout("000005-0000-001")
ENDS = [0.1, np.nan, -2.0]


def test_the_file_keeps_them_and_a_resumed_or_replayed_run_has_them(tmp_path):
    store = RolloutStore(tmp_path)
    store.append(WITH)
    store.append(WITHOUT)
    assert read_rollouts(step_file(tmp_path, 5)) == [WITH, WITHOUT]
    prompt = Prompt("é", text="?", tokens=[1, 2])
    session = StepSession(5, wanted_rollouts(5, [prompt], [2], 0, 0))
    session.reuse(RolloutStore(tmp_path).lines(5), range(4, 5), 4)
    kept = RolloutBatch.join([session.batches[name] for name in session.wanted])
    replayed = sampled(RecordedRollouts(tmp_path, 100), 5, [prompt], [2]).batch
    for batch in (kept, replayed, RolloutBatch.from_rollouts([WITH, WITHOUT])):
        np.testing.assert_array_equal(batch.step_rewards, [*ENDS, np.nan, np.nan])


@pytest.mark.parametrize(("largest", "kept"), [(None, 1), (5, 1), (4, 0)])
def test_an_episode_larger_than_the_limit_is_not_used_again(largest, kept):
    """Five tokens; the limit may have been lowered because such an episode was too large for the memory."""
    session = StepSession(5, wanted_rollouts(5, [Prompt("é", text="?", tokens=[1, 2])], [1], 0, 0))
    gone = session.reuse([dataclasses.replace(WITH, episode=EpisodeRecord([0], {}))], range(4, 5), 4, largest)
    assert session.reused == kept and len(gone) == 1 - kept


def test_what_a_function_gives_is_in_the_batch_and_in_the_file(with_generator, tmp_path):
    async def work(generator, push):
        await push(0)
        prompts = [Prompt("steps", text="?", tokens=[20, 30]), Prompt("p0", text="?", tokens=[21, 30])]
        return await generated(generator, 1, prompts, [1, 1], 0)

    batch = with_generator(work, Server()).batch
    np.testing.assert_array_equal(batch.step_rewards, [0.5, np.nan, -0.25, *[np.nan] * 3])
    lines = {r.prompt_id: r.step_rewards for r in read_rollouts(step_file(tmp_path, 1))}  # in the order they came in
    assert lines == {"steps": [(0, 1, 0.5), (1, 3, -0.25)], "p0": []}


def test_joining_and_taking_keep_each_rollouts_own():
    one, two = RolloutBatch.from_rollouts([WITHOUT]), RolloutBatch.from_rollouts([WITH, WITHOUT])
    joined = RolloutBatch.join([one, two])
    np.testing.assert_array_equal(joined.step_rewards, [np.nan, np.nan, *ENDS, np.nan, np.nan])
    np.testing.assert_array_equal(joined.take(np.array([1])).step_rewards, ENDS)
    episode = dataclasses.replace(WITHOUT, response_mask=[0, 1, 0, 1], episode=EpisodeRecord([0, 2], {}))
    episodes = RolloutBatch.join([RolloutBatch.from_rollouts([episode]) for _ in range(3)])
    assert episodes.segment_starts.tolist() == [0, 2, 4, 6, 8, 10]
    taken = episodes.take(np.array([0, 2]))
    assert taken.segment_starts.tolist() == [0, 2, 4, 6] and taken.trained.tolist() == [False, True] * 4
