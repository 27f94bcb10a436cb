import dataclasses
import json

import pytest

from dynamo_megatron.evaluation.results import (
    ProblemResult,
    align,
    compare_rows,
    markdown,
    markdown_table,
    read_results,
    results_file,
    summarise,
    write_results,
)


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


def test_markdown_table():
    summary = summarise([result("a", "11"), result("b", "11")], [1])
    lines = markdown_table([("start", summary)], [1, 2]).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2] == "| start | 2 | 2 | 100.0 (34.2 to 100.0) | - | 1.000 | 10.0 | 0.0 | 0.0 |"


def test_compare_pairs_by_problem_not_by_position():
    before = [result(str(i), "1000" if i % 2 else "0000") for i in range(40)]
    after = [result(str(i), "1100" if i % 2 else "1000") for i in range(40)]  # each problem gains a response
    table = markdown(compare_rows(before, after[::-1], [1, 4]))
    assert "| 40 problems |" in table
    assert "| pass@1 | 12.5 | 37.5 | +25.0 (+14.0 to +31.6) |" in table
    assert "| pass@4 | 50.0 | 100.0 | +50.0 (" in table


def test_only_the_same_problems_are_compared():
    a, b = result("a", "1"), result("b", "1")
    assert align([a, b], [b, a]) == [[a, b], [a, b]]
    for before, after in (([a, b], [a]), ([a], [a, b])):
        with pytest.raises(ValueError, match="problem 'b' is not in every evaluation"):
            compare_rows(before, after, [1])
    with pytest.raises(ValueError, match="problem 'a' is more than once"):
        align([a, b], [b, a, a])
