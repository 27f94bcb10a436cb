"""Equal answers that are written differently, and unequal ones that look alike; the references of public data sets."""

import json
import runpy
from collections import Counter
from pathlib import Path

import pytest
from answer_pairs import pairs

from dynamo_megatron.reward.math_answer import math_answer
from dynamo_megatron.types import Prompt

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
PAIRS = pairs()
# (reference, answer): why the reward judges it otherwise than the table
EXCEPTIONS = {}


def judged_equal(reference: str, answer: str) -> bool:
    return math_answer(Prompt("p", text="?", answer=reference), rf"So it is \boxed{{{answer}}}.") == 1.0


def test_the_table_is_large_and_says_nothing_twice():
    assert max(Counter(pair[1:3] for pair in PAIRS).values()) == 1
    assert sum(equal for *_, equal in PAIRS) >= 300 and sum(not equal for *_, equal in PAIRS) >= 100
    assert EXCEPTIONS.keys() <= {pair[1:3] for pair in PAIRS}


@pytest.mark.parametrize("rule", sorted({rule for rule, *_ in PAIRS}))
def test_pairs(rule):
    rows = [pair for pair in PAIRS if pair[0] == rule]
    judged = {(reference, answer): judged_equal(reference, answer) for _, reference, answer, _ in rows}
    wrong = {pair for *pair, equal in map(_keyed, rows) if judged[pair[0]] != equal}
    assert wrong == {pair for pair in EXCEPTIONS if pair in judged}
