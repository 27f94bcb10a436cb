"""The verdicts of `math` on the labelled answers of answers.jsonl: reference (gold), response, right or not (want)."""

import json
import runpy
from collections import Counter
from functools import cache
from pathlib import Path

from dynamo_megatron.reward.math_answer import math_answer
from dynamo_megatron.types import Prompt

ROOT = Path(__file__).resolve().parents[2]
BENCHMARK = runpy.run_path(str(ROOT / "benchmarks" / "math_verdicts.py"))
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "math_verdicts.json").read_text(encoding="utf-8"))
ROWS = [json.loads(line) for line in BENCHMARK["PAIRS"].read_text(encoding="utf-8").splitlines()]


@cache
def failures() -> list[dict]:
    return [r for r in ROWS if math_answer(Prompt("p", text="?", answer=r["gold"]), r["response"]) != r["want"]]


def listed(rows: list[dict]) -> str:
    return "\n".join([f"{len(rows)} of {len(ROWS)}", *(json.dumps(row, ensure_ascii=False) for row in rows)])


def test_half_of_the_answers_are_right_and_none_is_there_twice():
    assert max(Counter((row["gold"], row["response"]) for row in ROWS).values()) == 1
    assert len(ROWS) >= 1000 and 0.45 <= sum(row["want"] for row in ROWS) / len(ROWS) <= 0.55


def test_the_reported_cases():
    wrong = [row for row in failures() if row["kind"] == "reported"]
    assert not wrong, listed(wrong)


def test_few_wrong_answers_are_rewarded():
    wrong = [row for row in failures() if not row["want"]]
    assert len(wrong) <= 0.002 * sum(not row["want"] for row in ROWS), listed(wrong)


def test_few_right_answers_are_lost():
    wrong = [row for row in failures() if row["want"]]
    assert len(wrong) <= 0.01 * sum(row["want"] for row in ROWS), listed(wrong)


def test_the_page_has_the_figures():
    page = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    assert BENCHMARK["markdown"](RESULTS) in page
    assert RESULTS["pairs"] == {"wrong": sum(not r["want"] for r in ROWS), "right": sum(r["want"] for r in ROWS)}
    assert f"{len(ROWS)} pairs" in " ".join(page.split())
