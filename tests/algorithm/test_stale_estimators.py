"""What tools/stale_estimators.py says of rollouts of older weights."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "stale_estimators.py")))


@pytest.fixture(scope="module")
def measured(tool):
    return tool.measure(1500)


def test_the_ratio_of_the_response_leaves_no_bias_and_that_of_the_token_does(tool, measured):
    last = max(tool.STALENESS)
    for steps in tool.STALENESS:
        for name in ("", "; newest weights from the third token on"):
            assert measured[steps, f"rollout_correction, sequence{name}"].bias[1] == 0.0
    assert measured[last, "rollout_correction, token"].bias[1] > 15.0


def test_rollouts_of_older_weights_are_biased_the_more_the_older_they_are(tool, measured):
    first, _, last = (measured[steps, "as if on-policy"].bias for steps in tool.STALENESS)
    assert last[1] > first[2]


def test_the_page_agrees_with_fewer_replicates(tool, measured):
    page = (ROOT / "docs" / "estimators.md").read_text(encoding="utf-8")
    table, _ = tool.estimators.in_page(page, "stale")
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()[2:]]
    for (steps, name, bias, along, _), (key, figures) in zip(rows, measured.items(), strict=True):
        assert (int(steps), name) == key
        low, high = sorted(figures.bias[1:])
        assert low - 2 <= float(bias.split()[0]) <= high + 2, key
        assert float(along) == pytest.approx(100 * tool.LONGEST * figures.scale[0], abs=5), key
