"""The verdicts of `math` on labelled answers: reference (gold), response, right or not (want)."""

import json
from pathlib import Path

import pytest

from dynamo_megatron.reward.math_answer import math_answer
from dynamo_megatron.types import Prompt


def rows(name):
    """`answers` are those of the benchmark, `more_answers` were once judged wrong."""
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
    wrong = [
        row for row in judged if math_answer(Prompt("p", text="?", answer=row["gold"]), row["response"]) != row["want"]
    ]
    assert len(wrong) <= share * len(judged), "\n".join([f"{len(wrong)} {what}", *map(str, wrong)])
