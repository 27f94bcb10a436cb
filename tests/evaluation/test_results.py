import dataclasses
import json

import pytest

from dynamo_megatron.evaluation.results import (
    TABLE,
    SetScores,
    paired_bootstrap,
    read_results,
    results_file,
    suite_sets,
    suite_summary,
    suite_table,
    summarise,
    write_results,
)
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
    results = [result("é/1", "10"), result("2", "00")]
    for _ in range(2):
        write_results(path, results)
    assert read_results(path) == results


def test_broken_files_are_named(tmp_path):
    path = tmp_path / "r.jsonl"
    with pytest.raises(ValueError, match=r"r.jsonl: no such file"):
        read_results(path)
    good = result("1", "10").to_json()
    for bad, said in (('{"prompt_id": "x"}', "not a problem's result"), (good[:30], "")):
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


# Several models on several sets


def scored(name: str, *rows: str) -> SetScores:
    return SetScores.of([result(f"{name}/{i}", right) for i, right in enumerate(rows)], [1, 4])


LARGE = ("1000", "1110", "0000", "1111", "1100", "0000")
SCORES = {
    "base": {"small": scored("small", "1100", "0000"), "large": scored("large", *LARGE)},
    "tuned": {"small": scored("small", "1110", "1000"), "large": scored("large", *LARGE)},
}


def test_every_set_has_the_same_weight_in_the_average():
    summary = suite_summary(SCORES, [1, 4])
    assert json.loads(json.dumps(summary)) == summary
    for k, sets in {1: [1 / 4, 10 / 24], 4: [1 / 2, 4 / 6]}.items():
        figures = summary["models"]["base"]
        assert [figures["sets"][name][f"eval/pass@{k}"] for name in ("small", "large")] == pytest.approx(sets)
        average = figures["average"]
        assert average[f"eval/pass@{k}"] == pytest.approx(sum(sets) / 2)
        assert average[f"eval/pass@{k}_low"] <= average[f"eval/pass@{k}"] <= average[f"eval/pass@{k}_high"]


def test_differences_are_paired_by_problem():
    """Every problem of a set gains as much: intervals are those of equal differences. Unpaired ones are not."""
    differences = suite_summary(SCORES, [1, 4])["differences"]
    assert list(differences) == ["tuned"]
    tuned = differences["tuned"]["sets"]
    gains = {"small": (2, 0.25), "large": (6, 0.0)}
    for name, (problems, gain) in gains.items():
        expected = paired_bootstrap([0.0] * problems, [gain] * problems)
        assert [tuned[name][f"eval/pass@1{end}"] for end in ("", "_low", "_high")] == pytest.approx(list(expected))
    assert differences["tuned"]["average"]["eval/pass@1"] == pytest.approx(0.125)


def test_the_table_has_a_column_a_set_and_a_row_a_model():
    tables = [each.splitlines() for each in suite_table(suite_summary(SCORES, [1, 4]), [1, 4]).split("\n\n")]
    assert [len({line.count("|") for line in table}) for table in tables] == [1, 1, 1]
    first, _, details = tables
    assert first[0] == "| pass@1, % (95 %) | small (2) | large (6) | average |"
    assert [line.split(" | ")[0] for line in first[2:]] == ["| base", "| tuned", "| tuned - base, points"]
    assert "| +25.0 (-57.2 to +74.3) | +0.0 (-39.0 to +39.0) | +12.5 (" in first[4]
    assert details[2] == "| base, small | 2 | 4 | 0.250 | 10.0 | 0.0 | 0.0 |"


def test_the_sets_of_a_folder(tmp_path):
    for name in (*TABLE, "mine"):
        (tmp_path / f"{name}.jsonl").write_text("")
    assert list(suite_sets("table", str(tmp_path))) == list(TABLE)
    assert suite_sets("mine,amc23", str(tmp_path))["mine"] == str(tmp_path / "mine.jsonl")
    (tmp_path / "minerva.jsonl").unlink()
    with pytest.raises(ValueError, match=r"--suite: there is no file .*/minerva.jsonl"):
        suite_sets("table", str(tmp_path))
    for wrong in ("mine,", "../mine"):
        with pytest.raises(ValueError, match="is no name of a set"):
            suite_sets(wrong, str(tmp_path))
