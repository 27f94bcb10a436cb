import numpy as np

from dynamo_megatron.reports.page.curves import POINTS, bins, curves
from dynamo_megatron.reports.picture import moving_average


def test_a_long_run_has_few_points(record):
    """10,000 steps: means of 20 steps, of ..._max the largest, and the last step at the end."""
    rows = [{"step": s, "reward/mean": float(s), "rollout/logprob_gap_max": float(s)} for s in range(1, 10_001)]
    found = curves(record(rows))
    assert found["width"] == 20 and len(found["steps"]) == POINTS
    assert found["steps"][:2] == [20, 40] and found["steps"][-1] == 10_000
    assert found["values"]["reward/mean"][:2] == [10.5, 30.5]
    assert found["values"]["rollout/logprob_gap_max"][:2] == [20.0, 40.0]


def test_the_average_is_that_of_the_picture_and_has_no_lag(record):
    rows = [{"step": s, "reward/mean": float(s), "policy/kl": 0.1} for s in range(1, 41)]
    found = curves(record(rows))
    assert found["window"] == 11 and set(found["smooth"]) == {"reward/mean"}
    assert found["smooth"]["reward/mean"] == moving_average(np.arange(1.0, 41), 11).tolist()
    assert found["smooth"]["reward/mean"][5:-5] == found["values"]["reward/mean"][5:-5]
    assert curves(record(rows[:7]))["smooth"] == {}


def test_what_a_step_lacks_is_no_number(record):
    values = (0.5, float("nan"), None, "text", 0.25)
    rows = [{"step": s, "reward/mean": 0.1, "policy/kl": v} for s, v in enumerate(values, 1)]
    found = curves(record(rows))
    assert found["values"]["policy/kl"] == [0.5, None, None, None, 0.25]
    assert set(found["values"]) == {"policy/kl", "reward/mean"}


def test_lost_steps_are_a_point_without_a_value(record):
    found = curves(record([{"step": s, "reward/mean": 0.5} for s in (1, 2, 5, 6)]))
    assert found["steps"] == [1, 2, 3, 5, 6] and found["values"]["reward/mean"] == [0.5, 0.5, None, 0.5, 0.5]
    steps = [*range(1, 601), *range(1001, 1421)]  # three of them in a point
    found = curves(record([{"step": s, "reward/mean": 0.5} for s in steps]))
    assert found["steps"][199:202] == [600, 601, 1003] and found["values"]["reward/mean"].count(None) == 1


def test_utilisation_is_over_the_servers(record):
    shares = {"fleet/server-0/busy_share": 0.5, "fleet/server-1/busy_share": 1.0}
    found = curves(record([{"step": 1, "reward/mean": 0.1, **shares}]))["values"]
    assert found["fleet/busy_share_mean"] == [0.75] and found["fleet/busy_share_min"] == [0.5]


def test_bins_are_equally_wide():
    assert np.bincount(bins(11, 4)).tolist() == [3, 3, 3, 2] and bins(3, 4).tolist() == [0, 1, 2]
