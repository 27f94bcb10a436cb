"""The Monte-Carlo of docs/estimators.md on baselines from history."""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool():
    before = list(sys.path)
    yield SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "history_estimators.py")))
    sys.path[:] = before


@pytest.mark.full
def test_faults_are_seen_and_history_is_not_one(tool):
    right = "history, 1 each"
    faults = ["fault: statistics updated first, 1 each", "fault: own reward in the baseline, 1 each"]
    found = tool.measure(4000, [right, *faults])
    assert found[right].bias[1] == 0 and all(found[fault].bias[1] > 5 for fault in faults), found
    low, high = found[right].scale[1:]
    assert low <= 1 / tool.LONGEST <= high, "prompt_mean divides by the longest length and nothing else"


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_the_page_agrees_with_fewer_replicates(tool):
    """The figures of the page, at their full count, lie within what these leave open."""
    estimators = sys.modules["estimators"]
    rows = estimators.in_page(estimators.PAGE.read_text(encoding="utf-8"), "history")[0].splitlines()[2:]
    found = tool.measure(4000)
    unit = found["rloo, 8 each"].variance * 8
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == list(found)
    for row, (name, figures) in zip(rows, found.items(), strict=True):
        bias, variance = row.split(" | ")[1], float(row.split(" | ")[2].removesuffix(" |"))
        _, low, high = figures.bias
        assert low - 2 <= float(bias.split()[0]) <= high + 2, name
        if "later" not in name:
            assert (low > 5) == name.startswith("fault"), name
        assert variance == pytest.approx(figures.variance * tool.DESIGNS[name].counts.mean() / unit, rel=0.1), name
