"""The figures of docs/estimators.md about drawing prompts."""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool():
    return SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "drawing.py")))


@pytest.fixture(scope="module")
def quick(tool):
    return tool.measure(1500)


def rows(table: str) -> dict[str, list[float]]:
    """name -> bias, its interval, along, variance."""
    cells = [line.strip("| ").replace("(", "| ").replace(")", "").replace(" to ", " | ") for line in table.splitlines()]
    split = [[cell.strip() for cell in line.split("|")] for line in cells[2:]]
    return {name: [float(number) for number in numbers] for name, *numbers in split}


def rows_of_page() -> dict[str, list[float]]:
    estimators = sys.modules["estimators"]  # imported by the tool
    return rows(estimators.in_page(estimators.PAGE.read_text(encoding="utf-8"), "drawing")[0])


def test_a_prompts_weights_have_mean_one_where_they_are_known(tool):
    success = tool.make_problem().success
    share = len(success) / tool.DRAWN
    for name, replicates in (("uniform", 1000), ("priority, weights", 2000)):
        total = tool.drawn_weights(tool.RULES[name], success, replicates) * share
        error = total.std(0) / np.sqrt(replicates)
        assert (np.abs(total.mean(0) - 1) < 4 * error).all(), name
    plain = tool.drawn_weights(tool.RULES["priority"], success, 1000) * share
    assert plain.mean(0)[[0, -1]].max() < 0.8 < 1.2 < plain.mean(0)[5:8].min()


@pytest.mark.full
def test_only_weights_leave_the_direction_alone(quick):
    assert quick["uniform"].bias[1] == quick["priority, weights"].bias[1] == 0
    for name in ("uniform", "priority, weights"):
        low, high = quick[name].scale[1:]
        assert low <= 1 / 5 <= high, f"{name}: the mean over all prompts, over the longest length"
    assert quick["thompson"].bias[1] > 30


@pytest.mark.full
def test_the_page_agrees_with_a_few_replicates(tool, quick):
    page = rows_of_page()
    assert list(page) == list(quick)
    for name, figures in quick.items():
        _, low, high = figures.bias
        assert low - 3 <= page[name][0] <= high + 3, name
        assert page[name][4] == pytest.approx(figures.variance / quick["uniform"].variance, rel=0.15), name


@pytest.mark.full
def test_the_page_is_what_the_tool_prints(tool):
    page = rows_of_page()
    now = rows(tool.table(tool.measure(tool.REPLICATES)))
    assert list(page) == list(now)
    for name, numbers in now.items():
        np.testing.assert_allclose(page[name], numbers, atol=1.1)  # the last place, in percent; 0.1 or 0.01 else
