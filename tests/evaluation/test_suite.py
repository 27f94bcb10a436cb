import itertools
import json

import numpy as np
import pytest

from dynamo_megatron.evaluation.estimates import paired_bootstrap
from dynamo_megatron.evaluation.results import TABLE, ProblemResult, SetScores, suite_sets, suite_summary, suite_table


def scored(name: str, *rows: str):
    """`rows`: a 1 or 0 for each response to a problem."""
    results = []
    for i, right in enumerate(rows):
        n = len(right)
        lists = {"rewards": [float(r) for r in right], "successes": [r == "1" for r in right], "lengths": [10] * n}
        lists |= {"finish_reasons": ["stop"] * n, "statuses": ["ok"] * n, "responses": ["r"] * n}
        results.append(ProblemResult(prompt_id=f"{name}/{i}", source=name, **lists))
    return SetScores.of(results, [1, 4])


def by_enumeration(rows: tuple[str, ...], k: int) -> float:
    found = [[("1" in draw) for draw in itertools.combinations(right, k)] for right in rows]
    return float(np.mean([np.mean(each) for each in found]))


SMALL, LARGE = ("1100", "0000"), ("1000", "1110", "0000", "1111", "1100", "0000")
BETTER = ("1110", "1000")
SCORES = {
    "base": {"small": scored("small", *SMALL), "large": scored("large", *LARGE)},
    "tuned": {"small": scored("small", *BETTER), "large": scored("large", *LARGE)},
}


def test_every_set_has_the_same_weight_in_the_average():
    summary = suite_summary(SCORES, [1, 4])
    assert json.loads(json.dumps(summary)) == summary
    for k in (1, 4):
        sets = [by_enumeration(SMALL, k), by_enumeration(LARGE, k)]
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
