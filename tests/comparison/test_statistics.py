"""Costs, targets and intervals by hand, and the bootstrap against every resample of two seeds."""

import math

import numpy as np
import pytest

from dynamo_megatron.comparison.statistics import Arm, cost_to, find, summarise

NAN, INF = math.nan, math.inf


def arm(*rates: list[tuple[list[float], list[float]]], failed=()) -> Arm:
    """One (scores, rollouts) a seed and rate; ten tokens and .01 s a rollout. `failed`: (rate, seed)."""
    longest = max(len(scores) for rate in rates for scores, _ in rate)
    scores = np.full((len(rates), len(rates[0]), longest), np.nan)
    costs = np.zeros((*scores.shape, 3))
    for r, rate in enumerate(rates):
        for s, (values, rollouts) in enumerate(rate):
            scores[r, s, : len(values)] = values
            costs[r, s, : len(values)] = np.outer(rollouts, [1, 10, 0.01])
    marks = np.zeros(scores.shape[:2], bool)
    for place in failed:
        marks[place] = True
    return Arm(scores, costs, marks)


def line(half: float, final: float = 1.0) -> tuple[list[float], list[float]]:
    """From a score of 0 to `final` in a straight line that is at .5 after `half` rollouts."""
    return [0.0, final], [0.0, 2 * half * final]


@pytest.mark.parametrize(
    ("scores", "target", "rollouts"),
    [
        ([0.2, 0.4, 0.4, 0.8], 0.6, 250.0),  # half way between the third and the fourth
        ([0.2, 0.7, 0.3, 0.9], 0.6, 80.0),  # the first time counts
        ([0.2, 0.4, 0.4, 0.8], 0.8, 300.0),
        ([0.2, 0.4, 0.4, 0.8], 0.2, 0.0),
        ([0.2, 0.4, 0.4, 0.8], 0.81, INF),
        ([0.2, 0.4, NAN, NAN], 0.3, 50.0),
        ([0.2, 0.4, NAN, NAN], 0.6, INF),
        ([NAN] * 4, 0.0, INF),
        ([0.2, 0.4, 0.4, 0.8], NAN, INF),
    ],
)
def test_the_cost_of_one_run(scores, target, rollouts):
    one = arm([(scores, [0, 100, 200, 300])])
    assert cost_to(one, target)[0, 0] == pytest.approx([rollouts, 10 * rollouts, 0.01 * rollouts])


def test_the_target_is_of_the_control_s_best_rate_and_each_figure_selects_its_own():
    control = arm(
        [([0.2, 0.5, 0.5], [0, 100, 200]), ([0.4, 0.5, 0.7], [0, 100, 200])],  # mean final .6
        [([0.1, 0.3, 0.9], [0, 100, 200]), ([0.3, 0.4, 0.9], [0, 100, 200])],  # mean final .9: the best; start .2
    )
    found = summarise({"a": control, "b": control}, "b", np.array([0, 1]))
    assert found.start == pytest.approx(0.2) and found.targets == pytest.approx([0.55, 0.83])
    assert found.final == pytest.approx([0.9, 0.9]) and found.final_rate.tolist() == [1, 1]
    # .55 at the first rate: never and 125; at the second one 100 + 100 (.25 / .6) and 100 + 100 (.15 / .5)
    assert found.cost[0, 0, 0] == pytest.approx((141 + 2 / 3 + 130) / 2)
    assert found.cost[0, 0, 1] == pytest.approx(10 * found.cost[0, 0, 0])
    assert found.cost_rate[:, :, 0].tolist() == [[1, 1], [1, 1]]
    quick = arm([line(100, 1.0)] * 2, [line(50, 0.6)] * 2)
    found = summarise({"c": arm([line(100)] * 2), "q": quick}, "c", np.array([0, 1]))
    assert found.final_rate.tolist() == [0, 0]
    assert found.cost_rate[1, :, 0].tolist() == [1, 0]  # the quick rate does not come to 90 %
    assert found.cost[:, :, 0] == pytest.approx(np.array([[100, 180], [50, 180]]))


def test_the_learning_rate_is_selected_anew_in_every_resample():
    control = arm([line(200), line(200)])
    both = arm([line(100), line(300)], [line(300), line(100)])
    ratio = find({"c": control, "both": both}, "c").ratio["both"][0][0]
    assert tuple(ratio) == pytest.approx((1.0, 0.5, 1.0))  # 100 in (0, 0) and (1, 1), each at another rate
    fixed = arm([line(100), line(300)])
    assert tuple(find({"c": control, "fixed": fixed}, "c").ratio["fixed"][0][0]) == pytest.approx((1.0, 0.5, 1.5))


def test_a_divergence_is_not_averaged_away():
    control, runs = arm([line(200)] * 5), [line(100)] * 5
    diverging = arm(runs, failed=[(0, 4)])
    found = find({"c": control, "d": diverging}, "c")
    assert found.summary.cost[1, 0, 0] == INF and found.summary.final[1] == -INF
    assert tuple(found.ratio["d"][0, 0]) == (INF, pytest.approx(0.5), INF)  # a third of the resamples lacks that seed
    assert tuple(found.difference["d"]) == (-INF, -INF, pytest.approx(0.0))
    slower = arm(runs, [line(150)] * 5, failed=[(0, 4)])
    found = find({"c": control, "s": slower}, "c")
    assert found.summary.cost_rate[1, 0, 0] == 1 and found.ratio["s"][0, 0, 0] == pytest.approx(0.75)
    assert found.ratio["s"][0, 0, 2] == pytest.approx(0.75)


def test_runs_that_never_reach_the_target_count_as_infinite_in_the_median():
    control = arm([line(100)] * 5)
    below = [line(80, 0.45)]
    found = find({"c": control, "two": arm([line(50)] * 3 + below * 2), "three": arm([line(50)] * 2 + below * 3)}, "c")
    assert tuple(found.ratio["two"][0, 0]) == (pytest.approx(0.5), pytest.approx(0.5), INF)
    assert found.ratio["three"][0, 0, 0] == INF
