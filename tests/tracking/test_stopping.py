import pytest

from dynamo_megatron.config import StopConfig
from dynamo_megatron.tracking.stopping import StopRule


def rows(metric: str, values: list[float], every: int = 1) -> list[dict]:
    return [{"step": every * (i + 1), metric: value} for i, value in enumerate(values)]


def observed(rule: StopRule, metrics: list[dict]) -> list[str | None]:
    return [rule.observe(row) for row in metrics]


def test_above_needs_the_average_over_a_full_window_and_below_a_value():
    below = StopRule(StopConfig(metric="policy/entropy", below=0.1))
    assert observed(below, rows("policy/entropy", [0.2])) == [None]
    assert observed(below, rows("policy/loss", [0.0])) == [None]  # a metric that has come once may be missing
    assert observed(below, rows("policy/entropy", [0.05])) == ["policy/entropy is 0.05, at or below 0.1"]
    rule = StopRule(StopConfig(metric="reward/mean", window=3, above=0.5))
    assert observed(rule, rows("reward/mean", [1.0, 0.9, -0.5, 0.5, 1.5])) == [
        *[None] * 4,
        "reward/mean, averaged over 3 values, is 0.5, at or above 0.5",
    ]


def test_patience_is_counted_in_steps_and_an_equal_value_is_no_better_one():
    rule = StopRule(StopConfig(metric="eval/pass@1", patience=30))
    reasons = observed(rule, rows("eval/pass@1", [0.3, 0.4, 0.431, 0.431, 0.2, 0.431], every=10))
    assert reasons == [*[None] * 5, "eval/pass@1 is not better than 0.431 (step 30) for 30 steps"]


def test_patience_over_a_window_is_about_the_average():
    low = StopRule(StopConfig(metric="sft/loss", mode="min", patience=2))
    assert observed(low, rows("sft/loss", [3.0, 3.1, 2.9, 3.0]))[-1] is None
    rule = StopRule(StopConfig(metric="reward/mean", window=2, patience=2))
    reasons = observed(rule, rows("reward/mean", [0.0, 1.0, 0.0, 0.9]))
    assert reasons[-1] == "reward/mean, averaged over 2 values, is not better than 0.5 (step 2) for 2 steps"


@pytest.mark.parametrize(
    ("metric", "row", "nearest"),
    [
        ("reward/maen", {"step": 1, "reward/mean": 0.0, "reward/success": 0.0}, "reward/mean"),
        ("eval/pass@8", {"step": 0, "eval/pass@1": 0.0, "eval/reward": 0.0}, "eval/pass@1"),
    ],
)
def test_a_metric_that_will_never_come_is_refused_with_the_nearest(metric, row, nearest):
    rule = StopRule(StopConfig(metric=metric, above=1.0))
    other_kind = {"step": 0, "eval/length_mean" if metric.startswith("reward") else "reward/mean": 0.0}
    assert rule.observe(other_kind) is None
    with pytest.raises(ValueError, match=f"trainer.stop_when.metric: this run has no {metric}; .* is {nearest}$"):
        rule.observe(row)


def test_a_replayed_rule_gives_the_reason_of_the_last_step_alone():
    rows = [{"step": s, "reward/mean": r} for s, r in ((1, 0.1), (2, 0.9), (3, 0.2))]
    config = StopConfig(metric="reward/mean", above=0.5)
    assert StopRule(config).replay(rows) is None
    assert StopRule(config).replay(rows[:2]) == "reward/mean is 0.9, at or above 0.5"
    both = rows[:2], [{"step": 2, "eval/pass@1": 0.1}]  # the evaluation's row comes after the step's
    assert StopRule(config).replay(*both) == "reward/mean is 0.9, at or above 0.5"
