import json

import numpy as np
import pytest

from dynamo_megatron.reports.page.allocation import allocation_view, by_source
from dynamo_megatron.reports.run_record import Revisits


def write(folder, *rows) -> None:
    (folder / "allocation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_difficulty_against_rollouts(tmp_path):
    """Six visits in steps 2 to 4 with an even split of 4."""
    revisits = Revisits(
        steps=np.array([2, 2, 3, 3, 4, 4]),
        success_rates=np.array([0.0, 0.5, 0.5, 1.0, 0.5, 1.0]),
        rollouts=np.array([2, 6, 8, 2, 4, 2]),
        first_visits=7,
        uniform=4.0,
    )
    visits = allocation_view(tmp_path, revisits)["visits"]
    never, _, sometimes, _, always = range(5)
    assert visits["steps"] == [2, 3, 4]
    assert visits["mean"][never] == [2.0, None, None] and visits["count"][never] == [1, 0, 0]
    assert visits["mean"][sometimes] == [6.0, 8.0, 4.0] and visits["mean"][always] == [None, 2.0, 2.0]
    row = visits["table"][sometimes]
    assert (row["visits"], row["mean"]) == (3, 6.0)
    assert (row["share"], row["even_share"]) == (pytest.approx(18 / 24), pytest.approx(3 / 6))
    assert visits["thirds"] == {
        "first third": [[0.0, 2.0, 1.0], [0.5, 6.0, 1.0]],
        "middle third": [[0.5, 8.0, 1.0], [1.0, 2.0, 1.0]],
        "last third": [[0.5, 4.0, 1.0], [1.0, 2.0, 1.0]],
    }


def test_a_column_without_visits_has_its_place(tmp_path):
    """Of 80 steps in 40 columns the first, the fifth and the last have visits."""
    steps = np.array([1, 10, 80])
    revisits = Revisits(steps, np.full(3, 0.5), np.full(3, 4), first_visits=1, uniform=4.0)
    visits = allocation_view(tmp_path, revisits)["visits"]
    assert visits["steps"] == list(range(2, 81, 2))
    assert [np.flatnonzero(row).tolist() for row in visits["count"]] == [[], [], [0, 4, 39], [], []]


def test_the_variance_against_an_even_split(tmp_path):
    """Step 1: .25/3 + 0/1 against .25/2; step 2: all equal; step 3: the allocator expects none at all."""
    pairs = {1: [(3, 0.25), (1, 0.0)], 2: [(2, 0.1), (2, 0.1)], 3: [(2, 0.0), (2, 0.0)]}
    rows = [{"step": s, "prompt_id": "p", "n": n, "variance": v} for s, given in pairs.items() for n, v in given]
    write(tmp_path, *rows)
    assert allocation_view(tmp_path, None)["expected"] == {"steps": [1, 2, 3], "ratio": [0.6667, 1.0, None]}


def test_what_is_missing_is_said(tmp_path):
    view = allocation_view(tmp_path, None)
    assert view["visits"] is None and "lacks the rollouts of a step" in view["why"]
    none = Revisits(np.zeros(0, int), np.zeros(0), np.zeros(0, int), 4, 8.0)
    assert "a second time" in allocation_view(tmp_path, none)["why"]


def test_sources_of_the_last_quarter(tmp_path):
    rows = [{"step": s, "n": 2 * s, "stratum": name} for s in range(1, 9) for name in ("b", "a")]
    write(tmp_path, *rows, {"step": 8, "n": 1, "stratum": "a"})
    found = [{"source": "a", "visits": 3, "rollouts": 31}, {"source": "b", "visits": 2, "rollouts": 30}]
    assert by_source(tmp_path, 8) == found
    write(tmp_path, {"step": 8, "n": 2})
    assert by_source(tmp_path, 8) == []
