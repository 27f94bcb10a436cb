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
BENCHMARK = runpy.run_path(str(ROOT / "benchmarks" / "math_answers.py"))
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "math_answers.json").read_text())
SETS = tuple(RESULTS["sets"])
PAIRS = pairs()
# (reference, answer): why the reward judges it otherwise than the table
EXCEPTIONS = {
    (r"\sin(2t)", r"2\sin t\cos t"): "math-verify does not read functions without brackets one after another",
    (r"x \in [-2,7]", r"-2 \le x \le 7"): "math-verify compares a set with a relation only where the reference is one",
}


def judged_equal(reference: str, answer: str) -> bool:
    return math_answer(Prompt("p", text="?", answer=reference), rf"So it is \boxed{{{answer}}}.") == 1.0


def test_the_table_is_large_and_says_nothing_twice():
    assert max(Counter(pair[1:3] for pair in PAIRS).values()) == 1
    assert sum(equal for *_, equal in PAIRS) >= 300 and sum(not equal for *_, equal in PAIRS) >= 100
    assert EXCEPTIONS.keys() <= {pair[1:3] for pair in PAIRS}


@pytest.mark.parametrize("rule", sorted({rule for rule, *_ in PAIRS}))
def test_pairs(rule):
    rows = [pair[1:] for pair in PAIRS if pair[0] == rule]
    otherwise = {(reference, answer) for reference, answer, equal in rows if judged_equal(reference, answer) != equal}
    assert otherwise == {pair[:2] for pair in rows} & EXCEPTIONS.keys()


def test_the_page_has_the_table_of_the_figures():
    page = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    assert BENCHMARK["markdown"](RESULTS) in page
    counts = RESULTS["pairs"]
    assert counts["equal"] + counts["different"] == len(PAIRS) == counts["math"] + len(EXCEPTIONS)
    assert f"{counts['math']} of {len(PAIRS)}" in page and f"math-verify alone {counts['math-verify']}" in page


def references(name: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().split("\n") if line]


@pytest.mark.skipif(not DATA.is_dir(), reason="no data folder beside the repository")
@pytest.mark.parametrize("name", SETS)
def test_a_reference_in_a_box_is_right_and_with_another_digit_it_is_wrong(name):
    known = RESULTS["sets"][name]["math"]
    for row in references(name)[:: max(1, RESULTS["sets"][name]["answers"] // 40)]:
        reference = row["answer"]
        assert judged_equal(reference, reference) != (row["id"] in known["not equal to itself"]), row
        other = BENCHMARK["perturbed"](reference)
        assert judged_equal(reference, other) == (row["id"] in known["equal to the perturbed one"]), (row, other)


@pytest.mark.full
@pytest.mark.skipif(not DATA.is_dir(), reason="no data folder beside the repository")
@pytest.mark.parametrize("name", SETS)
def test_the_exceptions_are_those_of_the_figures(name):
    """All references, through the pool's workers."""
    known = RESULTS["sets"][name]
    found = BENCHMARK["examined"](references(name))
    assert (found["answers"], found["math"]) == (known["answers"], known["math"])
