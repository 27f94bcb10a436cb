"""The committed figures of an evaluation are those of its responses, and docs/data.md has them."""

import json
import runpy
from fractions import Fraction
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def benchmark():
    return runpy.run_path(str(ROOT / "benchmarks" / "evaluation.py"))


def test_the_page_has_the_figures_and_they_agree(benchmark):
    results = json.loads((ROOT / "benchmarks" / "results" / "evaluation.json").read_text())
    assert benchmark["differing"](results) == []
    assert results["computed"]["eval/problems"] == 200 and results["computed"]["eval/samples"] == 1600
    assert benchmark["markdown"](results) in (ROOT / "docs" / "data.md").read_text(encoding="utf-8")


def test_a_figure_that_differs_is_named(benchmark):
    results = {"eval": {"eval/pass@1": 0.5, "eval/problems": 2}, "computed": {"eval/pass@1": 0.25, "eval/problems": 2}}
    assert benchmark["differing"](results) == ["eval/pass@1"]


def test_pass_at_k_counts_draws(benchmark):
    problems = [[True, False, False, False], [False] * 4]
    assert [benchmark["pass_at_k"](problems, k) for k in (1, 2, 4)] == [Fraction(1, 8), Fraction(1, 4), Fraction(1, 2)]


@pytest.mark.parametrize(
    ("response", "expected"),
    [("so 3 + 4 = 7.", True), ("It costs $1,007.", False), ("7, no: 8", False), ("seven", False), ("7.0", True)],
)
def test_the_last_number_decides(benchmark, response, expected):
    assert benchmark["ends_with_answer"]({"responses": [response], "answer": "7"}) == [expected]
