import pytest
from pydantic import ValidationError

from dynamo_megatron.config import RewardConfig
from dynamo_megatron.reward.functions import load_function
from dynamo_megatron.types import Prompt

PROMPT = Prompt("p", text="?", answer="1")


def given(response, **form):
    return load_function("format", RewardConfig(functions=["format"], format=form))(PROMPT, response)


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("<think>a\nb</think>\n<answer>1</answer>\n", 1.0),
        ("<think></think><answer></answer>", 1.0),
        ("<think>a < b, <b>bold</b></think> <answer>1</answer>", 1.0),
        ("Well, <think>a</think><answer>1</answer>", 0.0),
        ("<think>a</think> so <answer>1</answer>", 0.0),
        ("<think>a</think><answer>1</answer> done", 0.0),
        ("<answer>1</answer><think>a</think>", 0.0),
        ("<think>a<answer>1</answer></think>", 0.0),
        ("<think>a</think><answer>1</answer><answer>2</answer>", 0.0),
        ("<think>a<think></think><answer>1</answer>", 0.0),
        ("<think>a</think><answer>1", 0.0),
        ("</think><think><answer>1</answer>", 0.0),
        ("1", 0.0),
        ("", 0.0),
        ("<think>" * 150_000, 0.0),
    ],
)
def test_tags(response, value):
    assert given(response) == value


def test_tags_of_ones_own():
    assert given("<plan>p</plan><code>c</code><answer>1</answer>", tags=["plan", "code", "answer"]) == 1.0
    assert given("<think>a</think><answer>1</answer>", tags=["answer"]) == 0.0


def test_a_pattern_is_for_the_whole_response():
    pattern = r".*</think>\s*<answer>\d+</answer>\s*"
    assert given("hm\nhm</think>\n<answer>12</answer>\n", pattern=pattern) == 1.0
    assert given("hm</think><answer>12</answer> and more", pattern=pattern) == 0.0


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"pattern": "(a"}, "not a regular expression"),
        ({"tags": ["<think>"]}, "should match pattern"),
        ({"tags": []}, "at least 1"),
    ],
)
def test_what_is_no_form_is_refused_with_the_config(form, words):
    with pytest.raises(ValidationError, match=words):
        RewardConfig(format=form)


def test_it_is_a_part_of_a_fused_reward(pool, score):
    started = pool("choice", "format", workers=1)
    (good, bad) = score(started, Prompt("p", text="?", answer="B"), "<think>x</think><answer>B</answer>", "B")
    assert (good.reward, good.parts) == (2.0, {"choice": 1.0, "format": 1.0})
    assert (bad.reward, bad.success) == (1.0, True)


def test_a_catastrophic_pattern_is_ended_by_the_deadline(pool, score):
    started = pool("format", format={"pattern": "(a+)+b"}, deadline=5.0, workers=1)  # which the next one must not miss
    slow, fine = score(started, PROMPT, "a" * 60, "aab")
    assert (slow.status, slow.reward) == ("reward_timeout", 0.0)
    assert (fine.status, fine.reward) == ("ok", 1.0)
