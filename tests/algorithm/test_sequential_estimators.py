"""The figures of docs/estimators.md about rounds that look at the step's outcomes."""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
QUICK = (
    "one round of 16, rloo",
    "pilot, rloo, prompt_mean",
    "pilot, explore .25",
    "pilot, explore .25, history",
    "reinforce_ada as published: balanced, token_mean",
)


@pytest.fixture(scope="module")
def tool():
    return SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "sequential_estimators.py")))


@pytest.fixture(scope="module")
def quick(tool):
    return tool.measure(700, QUICK)


def rows(table: str) -> dict[str, list[float]]:
    """name -> bias, its interval, rollouts, variance."""
    found = {}
    for line in table.splitlines()[2:]:
        name, bias, *others = (cell.strip() for cell in line.strip("| ").split("|"))
        interval = bias.replace("(", "").replace(")", "").replace("to", "").split()
        found[name] = [float(number) for number in (*interval, *others)]
    return found


def rows_of_page() -> dict[str, list[float]]:
    estimators = sys.modules["estimators"]  # imported by the tool
    return rows(estimators.in_page(estimators.PAGE.read_text(encoding="utf-8"), "sequential")[0])


def test_known_chances_of_a_second_round_leave_the_gradient_alone(quick):
    for name in QUICK:
        figures, rollouts = quick[name]
        assert rollouts == pytest.approx(20 if "ada" in name else 16, abs=0.5), name
        if name in ("pilot, rloo, prompt_mean", "reinforce_ada as published: balanced, token_mean"):
            assert figures.bias[1] > 15, name
        else:
            low, high = figures.scale[1:]
            assert figures.bias[1] == 0 and low <= 1 / 5 <= high, f"{name}: the mean over the longest length"


def test_the_page_agrees_with_a_few_replicates(tool, quick):
    page = rows_of_page()
    assert list(page) == list(tool.DESIGNS)
    unit = quick["one round of 16, rloo"][0].variance * 16
    for name, (figures, rollouts) in quick.items():
        _, low, high = figures.bias
        assert low - 3 <= page[name][0] <= high + 3, name
        assert page[name][3:] == pytest.approx([rollouts, figures.variance * rollouts / unit], rel=0.15), name


@pytest.mark.full
def test_the_page_is_what_the_tool_prints(tool):
    page, now = rows_of_page(), rows(tool.table(tool.measure(tool.REPLICATES)))
    assert list(page) == list(now)
    for name, numbers in now.items():
        np.testing.assert_allclose(page[name], numbers, atol=0.11)
