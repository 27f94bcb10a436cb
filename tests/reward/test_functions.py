"""What a reward function may return: a number, or a number with rewards of steps."""

import hashlib
import math

import pytest
from pydantic import ValidationError

from dynamo_megatron.config import RewardConfig
from dynamo_megatron.reward.functions import checked_steps, load_function
from dynamo_megatron.types import Prompt

HASH = hashlib.sha256(b"y" * 300).hexdigest()


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (0.5, (0.5, [])),
        (True, (1.0, [])),
        ({"reward": 1, "steps": []}, (1.0, [])),
        ({"steps": [[0, 2, 1], (5, 10, -0.5)], "reward": 0}, (0.0, [(0, 2, 1.0), (5, 10, -0.5)])),
    ],
)
def test_a_number_and_steps_in_order_with_gaps_between_them(value, found):
    assert checked_steps(value, 10) == found


def of_steps(*steps):
    return {"reward": 1.0, "steps": list(steps)}


@pytest.mark.parametrize(
    "value, says",
    [
        (math.nan, "returned nan"),
        ("1.0", "returned '1.0' of type str, not a number"),
        (1e30, "returned 1e.30, of more than 1e.18 in size"),
        ({"reward": 1.0, "steps": "abc"}, "not of the form"),
        (of_steps((0, 5)), r"returned \(0, 5\) as step 1"),
        (of_steps((4, 4, 1.0)), "as step 1"),
        (of_steps((0, 5, 1.0), (4, 6, 1.0)), "as step 2, .* characters are 5 to 10 at most"),
        (of_steps((0, 5.0, 1.0)), "as step 1"),
        (of_steps((0, 5, math.inf)), "as step 1, .*returned inf"),
    ],
)
def test_what_is_no_reward_is_one_line(value, says):
    with pytest.raises(ValueError, match=says) as error:
        checked_steps(value, 10)
    assert "\n" not in str(error.value)


def given(response, **form):
    config = RewardConfig(functions=["format"], format=form)
    return load_function("format", config)(Prompt("p", text="?", answer="1"), response)


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("<think>a < b,\n<b>bold</b></think>\n<answer>1</answer>\n", 1.0),
        ("Well, <think>a</think><answer>1</answer>", 0.0),
        ("<answer>1</answer><think>a</think>", 0.0),
        ("<think>a</think><answer>1</answer><answer>2</answer>", 0.0),
        ("<think>a<think></think><answer>1</answer>", 0.0),
        ("<think>a</think><answer>1", 0.0),
    ],
)
def test_a_format_of_tags(response, value):
    assert given(response) == value


@pytest.mark.parametrize(
    ("response", "value"),
    [
        *(("", 0.0), ("a b c", 1.0), ("a b c d", 1.0), ("a\nb c d e", 0.75), ("a " * 8, 0.0), ("a " * 99, 0.0)),
        *(("<think>a b c d e f g h i</think> a", 1.0), ("<think>a", 0.0)),
    ],
)
def test_a_length_in_words(response, value):
    length = load_function("length", RewardConfig(functions=["length"], length={"words": 4}))
    assert length(Prompt("p", text="?"), response) == value


def test_a_format_of_other_tags_or_a_pattern():
    assert given("<plan>p</plan><answer>1</answer>", tags=["plan", "answer"]) == 1.0
    pattern = r".*</think>\s*<answer>\d+</answer>\s*"
    assert given("hm\nhm</think>\n<answer>12</answer>\n", pattern=pattern) == 1.0
    assert given("hm</think><answer>12</answer> and more", pattern=pattern) == 0.0
    with pytest.raises(ValidationError, match="not a regular expression"):
        RewardConfig(format={"pattern": "(a"})


READ = {  # reward function -> (answer of the problem, response, score, what it read)
    "math": [("1/2", r"\boxed{0.50}", 1.0, "1/2"), ("2", r"\boxed{3 }", 0.0, "3"), ("2", "no idea", 0.0, "")],
    "qa_f1": [("Rome", "<answer>The  ROME.</answer>", 1.0, "rome"), ("Rome", "y" * 300, 0.0, HASH)],
    "choice": [("B", "The answer is (b) or so. Answer: C", 0.0, "C"), ("B", "hm", 0.0, "")],
}


@pytest.mark.parametrize("name", READ)
def test_what_a_reward_read_as_the_answer(name):
    for answer, response, score, read in READ[name]:
        prompt = Prompt("p", text="?", answer=answer)
        found = load_function(name, RewardConfig())(prompt, response)
        assert (found, found.answer) == (score, read)
