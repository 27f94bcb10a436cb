"""The verdicts of `math`, and what it takes for the answer."""

import json
from pathlib import Path

import pytest

from dynamo_megatron.reward.extraction import boxed, last_number, tagged
from dynamo_megatron.reward.math_answer import math_answer
from dynamo_megatron.types import Prompt


def score(answer, response):
    return math_answer(Prompt("p", text="?", answer=answer), response)


def rows(name):
    """Labelled: reference (gold), response, right or not (want). `answers` are those of the benchmark, `more_answers`
    were once judged wrong."""
    lines = Path(__file__).with_name(f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("what", "name", "chosen", "share"),
    [
        ("reported cases", "answers", lambda row: row["kind"] == "reported", 0.0),
        ("wrong answers that are rewarded", "answers", lambda row: not row["want"], 0.002),
        ("right answers that are lost", "answers", lambda row: row["want"], 0.01),
        ("mended verdicts", "more_answers", lambda row: True, 0.0),
    ],
)
def test_few_verdicts_are_wrong(what, name, chosen, share):
    judged = [row for row in rows(name) if chosen(row)]
    wrong = [row for row in judged if score(row["gold"], row["response"]) != row["want"]]
    assert len(wrong) <= share * len(judged), "\n".join([f"{len(wrong)} {what}", *map(str, wrong)])


# Each took long or raised once.
DEGENERATE = [
    "####" + "1" * 30_000 + " x",
    r"\frac(A)1e999999",
    r"1.5e5\overline{3}",
    "9^{9^{9^{9}}}",
    "((9!)!)!",
    "{" * 5000 + "3" + "}" * 5000,
    "," * 100_000,
    r"\frac{10}{2.1} \approx 1 \times 10^{400}",
]


@pytest.mark.parametrize("box", DEGENERATE, ids=[box[:12] for box in DEGENERATE])
def test_degenerate_answers_are_wrong(box):
    assert score(7, rf"\boxed{{{box}}}") == score(7, box) == 0.0


@pytest.mark.parametrize("answer", [None, "", "  ", [1, 2], {"a": 1}, "$", r"\square"])
def test_an_answer_that_cannot_be_checked_is_an_error(answer):
    with pytest.raises(ValueError, match=r"math reward (needs an|finds nothing to compare in the) answer"):
        score(answer, "1")


def test_extraction():
    assert boxed(r"a \boxed{\frac{1}{2}} b") == r"\frac{1}{2}" and boxed(r"\boxed{\{1\}}") == r"\{1\}"
    assert boxed("no") is None and boxed(r"\boxed{1") is None
    assert boxed(r"\boxed{1} or \fbox{2}") == "1" and boxed(r"so \fbox{2}") == "2"
    assert boxed(r"\boxed{7}. \boxed{}") == "7" and boxed(r"\boxed 2.") == "2"
    assert boxed(r"$\boxed\frac12$") == r"\frac12" and boxed(r"\boxed{\frac{1}{2}") is None
    assert tagged("<answer>1</answer> <answer> 2\n</answer>") == "2" and tagged("</answer><answer>") is None
    assert last_number("3-5") == "5" and last_number("a -5.") == "-5" and last_number("1,234,567 x2") == "1234567"
    assert boxed(r"\boxed{\boxed{5} cm}") == "5" and boxed(r"} \boxed{1} {") == "1"
    assert boxed(r"\boxed{a\}b}") == r"a\}b"
    assert last_number("-1,234.5/6") == "-1234.5/6" and last_number("-.5") == "-.5" and last_number("-1,2") == "2"
    assert last_number("12,34") == "34" and last_number("v2") is None and last_number("to 1.5e-3.") == "1.5e-3"


@pytest.mark.parametrize(
    "unit", [r"\boxed{", r"\(", r"\[ x", "$", "$$ 1 ", "1,111,", "#### ", "{", "<answer>", ",\\!000"]
)
def test_a_response_that_repeats_itself_costs_no_time(unit):
    score(72, unit * (200_000 // len(unit)))
    tagged(unit * (200_000 // len(unit)))
