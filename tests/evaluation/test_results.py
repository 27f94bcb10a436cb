import dataclasses
import json

import pytest

from dynamo_megatron.evaluation.results import align, read_results, results_file, summarise, write_results
from dynamo_megatron.types import ProblemResult


def result(prompt_id: str, right: str, **changes) -> ProblemResult:
    """`right`: a 1 or 0 for each response."""
    n = len(right)
    made = ProblemResult(
        prompt_id=prompt_id,
        source="s",
        rewards=[float(r) for r in right],
        successes=[r == "1" for r in right],
        lengths=[10] * n,
        finish_reasons=["stop"] * n,
        statuses=["ok"] * n,
        responses=["a\u2028b\n"] * n,
    )
    return dataclasses.replace(made, **changes)


def test_what_was_written_is_read_back(tmp_path):
    path = results_file(tmp_path, 20)
    assert path == tmp_path / "eval" / "step-000020.jsonl"
    results = [result("é/1", "10"), result("2", "00")]
    for _ in range(2):
        write_results(path, results)
    assert read_results(path) == results
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_broken_files_are_named(tmp_path):
    path = tmp_path / "r.jsonl"
    with pytest.raises(ValueError, match=r"r.jsonl: no such file"):
        read_results(path)
    good, unequal = result("1", "10").to_json(), json.loads(result("2", "10").to_json())
    unequal["lengths"] = [3]
    for bad, said in (('{"prompt_id": "x"}', "not a problem's result"), (good[:30], ""), (json.dumps(unequal), "'2'")):
        path.write_text(f"{good}\n{bad}\n")
        with pytest.raises(ValueError, match=rf"r.jsonl:2: .*{said}"):
            read_results(path)


def test_summary():
    results = [
        result("a", "1100", lengths=[10, 20, 30, 40], finish_reasons=["stop", "stop", "length", "stop"]),
        result("b", "1111", statuses=["ok", "ok", "failed", "reward_timeout"]),
        result("c", "0000"),
    ]
    summary = summarise(results, [1, 4])
    assert json.loads(json.dumps(summary)) == summary
    assert (summary["eval/problems"], summary["eval/samples"]) == (3, 12)
    assert summary["eval/pass@1"] == pytest.approx(1 / 3)  # b: two of four, since failed responses are wrong
    assert summary["eval/pass@4"] == pytest.approx(2 / 3)
    assert summary["eval/pass@4_low"] == 0 and summary["eval/pass@4_high"] == 1
    assert summary["eval/reward"] == pytest.approx(0.5)
    assert summary["eval/length_mean"] == pytest.approx(15)
    assert summary["eval/truncated"] == pytest.approx(1 / 12)
    assert summary["eval/failed"] == pytest.approx(2 / 12)
    with pytest.raises(ValueError, match="no problems"):
        summarise([], [1])
    with pytest.raises(ValueError, match="pass@5"):
        summarise(results, [5])


def test_only_the_same_problems_are_compared():
    a, b = result("a", "1"), result("b", "1")
    assert align([a, b], [b, a]) == [[a, b], [a, b]]
    for before, after in (([a, b], [a]), ([a], [a, b])):
        with pytest.raises(ValueError, match="problem 'b' is not in every evaluation"):
            align(before, after)
    with pytest.raises(ValueError, match="problem 'a' is more than once"):
        align([a, b], [b, a, a])
