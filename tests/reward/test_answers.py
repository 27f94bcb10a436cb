"""The verdicts of `math` on the labelled answers of answers.jsonl: reference (gold), response, right or not (want)."""

import json
from pathlib import Path

import pytest

from dynamo_megatron.reward.math_answer import math_answer
from dynamo_megatron.types import Prompt

ROWS = [json.loads(line) for line in Path(__file__).with_name("answers.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    ("what", "chosen", "share"),
    [
        ("reported cases", lambda row: row["kind"] == "reported", 0.0),
        ("wrong answers that are rewarded", lambda row: not row["want"], 0.002),
        ("right answers that are lost", lambda row: row["want"], 0.01),
    ],
)
def test_few_verdicts_are_wrong(what, chosen, share):
    rows = [row for row in ROWS if chosen(row)]
    wrong = [
        row for row in rows if math_answer(Prompt("p", text="?", answer=row["gold"]), row["response"]) != row["want"]
    ]
    assert len(wrong) <= share * len(rows), "\n".join([f"{len(wrong)} {what}", *map(str, wrong)])
