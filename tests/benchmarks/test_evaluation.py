"""The benchmark that computes an evaluation's figures anew agrees with `eval`, and names a figure that differs."""

import json
import runpy
from fractions import Fraction
from pathlib import Path

import pytest
import yaml

from dynamo_megatron.evaluation.results import summarise, write_results
from dynamo_megatron.types import ProblemResult

ROOT = Path(__file__).parents[2]
K = [1, 2, 4]


@pytest.fixture(scope="module")
def benchmark():
    return runpy.run_path(str(ROOT / "benchmarks" / "evaluation.py"))


@pytest.fixture
def scores(tmp_path) -> Path:
    """What `eval` writes of one model and one set; the last response of each problem could not be scored."""
    made = [
        ProblemResult(
            f"p{i}",
            "set",
            rewards=[float(j < i) for j in range(4)],
            successes=[j < i for j in range(4)],
            lengths=[i + j for j in range(4)],
            finish_reasons=["stop", "length", "stop", "stop"],
            statuses=["ok", "ok", "ok", "reward_error"],
            responses=[f"It is {'12' if j < i else '13'}." for j in range(4)],
            answer="12",
        )
        for i in range(5)
    ]
    write_results(tmp_path / "problems.jsonl", made)
    (tmp_path / "summary.json").write_text(json.dumps(summarise(made, K)))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model": {"path": "m"}, "eval": {"k": K}}))
    return tmp_path


def test_the_figures_of_eval_are_those_of_its_responses(benchmark, scores):
    results = benchmark["examined"](scores)
    assert benchmark["differing"](results) == []
    # 0, 1, 2, 3, 3 right ones by the reward; the last number of a fourth is the answer, too
    assert results["computed"]["eval/pass@1"] == pytest.approx(9 / 20)
    assert list(results["responses"].values()) == [9, 10, 19]
    last = "10 by a simpler rule: a response is right if its last number is the answer. The rule and `eval` "
    last += "give the same verdict on 19"
    assert f"| right responses, of 20 | 9 | {last} |" in benchmark["markdown"](results)


def test_a_figure_that_differs_is_named(benchmark, scores):
    said = json.loads((scores / "summary.json").read_text())
    (scores / "summary.json").write_text(json.dumps({**said, "eval/pass@2": said["eval/pass@2"] + 1e-9}))
    assert benchmark["differing"](benchmark["examined"](scores)) == ["eval/pass@2"]


def test_pass_at_k_counts_draws(benchmark):
    problems = [[True, False, False, False], [False] * 4]
    assert [benchmark["pass_at_k"](problems, k) for k in (1, 2, 4)] == [Fraction(1, 8), Fraction(1, 4), Fraction(1, 2)]


@pytest.mark.parametrize(
    ("response", "expected"),
    [("so 3 + 4 = 7.", True), ("It costs $1,007.", False), ("7, no: 8", False), ("seven", False), ("7.0", True)],
)
def test_the_last_number_decides(benchmark, response, expected):
    assert benchmark["ends_with_answer"]({"responses": [response], "answer": "7"}) == [expected]


def test_the_page_has_the_table_of_the_results(benchmark):
    """The marks are there also without results."""
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    table = page.partition("<!-- begin: gsm8k -->\n")[2].partition("<!-- end: gsm8k -->")[0]
    if not benchmark["RESULTS"].exists():
        assert "<!-- begin: gsm8k -->\n<!-- end: gsm8k -->\n" in page
        pytest.skip("there is no benchmarks/results/evaluation.json")
    results = json.loads(benchmark["RESULTS"].read_text(encoding="utf-8"))
    assert benchmark["differing"](results) == [] and benchmark["markdown"](results) in table
