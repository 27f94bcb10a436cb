"""What tools/demo_task.py says of the class task."""

import runpy
from collections import Counter, defaultdict
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def task():
    return runpy.run_path(str(Path(__file__).parents[1] / "tools" / "demo_task.py"))["classes"](0)


def used_keys(rows):
    """class -> the key digits that made each of its answers."""
    keys = defaultdict(list)
    for row in rows:
        text = row["problem"][1:5]
        keys[row["class"]].append([(int(a) - int(t)) % 10 for a, t in zip(row["answer"], text, strict=True)])
    return keys


def test_every_answer_of_the_pool_is_by_its_classs_key(task):
    keys = used_keys(task["pool"])
    assert len(keys) == 48 and {len(rows) for rows in keys.values()} == {4}
    assert all(row == rows[0] for rows in keys.values() for row in rows)


def test_warm_up_answers_follow_one_rival_in_one_or_two_places(task):
    right, expected = used_keys(task["pool"]), []
    for name, rows in used_keys(task["warmup"]).items():
        digits = [Counter(column) for column in zip(*rows, strict=True)]
        assert sorted(len(seen) for seen in digits) in ([1, 1, 1, 2], [1, 1, 2, 2])
        share = 1.0
        for seen, key in zip(digits, right[name][0], strict=True):
            share *= seen[key] / seen.total()
        expected.append(share)
    assert sum(expected) / len(expected) == pytest.approx(0.56, abs=0.02), "pass@1 of a perfect imitation"
    assert min(expected) > 0.02, "exploration is not what limits progress"


def test_the_pools_problems_are_not_in_the_warm_up(task):
    assert not {row["problem"] for row in task["pool"]} & {row["problem"] for row in task["warmup"]}
