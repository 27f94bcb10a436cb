from itertools import combinations

import numpy as np
import pytest

from dynamo_megatron.evaluation.results import average_bootstrap, paired_bootstrap, pass_at_k


def test_pass_at_k_against_enumeration():
    """The share of all draws of k responses without replacement that hold a right one."""
    for n in range(1, 8):
        for k in range(1, n + 1):
            for c in range(n + 1):
                draws = [any(draw) for draw in combinations([True] * c + [False] * (n - c), k)]
                assert pass_at_k([n], [c], k)[0] == pytest.approx(np.mean(draws), abs=1e-14)


def test_pass_at_k_of_many_samples():
    """C(100000, 1000) overflows every float; the limit is 1 - (1 - p)^k."""
    values = pass_at_k([100_000, 100_000, 1000], [100, 0, 1000], 1000)
    assert values.dtype == np.float64
    assert values[0] == pytest.approx(1 - 0.999**1000, rel=5e-3)
    assert values[1:].tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        (average_bootstrap([[0.0] * 16]), (0, 0, 0.1936)),  # Wilson's of 0 of 16, and so on
        (average_bootstrap([[1.0] * 30]), (1, 0.8865, 1)),
        (average_bootstrap([[0.5] * 16]), (0.5, 0.4032, 0.5968)),
        (paired_bootstrap([0.0] * 16, [1.0] * 16), (1, 0.6128, 1)),
        (average_bootstrap([[0.0] * 16, [0.0] * 16]), (0, 0, 0.1936 / np.sqrt(2))),
    ],
)
def test_equal_values_leave_the_mean_uncertain(interval, expected):
    assert interval == pytest.approx(expected, abs=1e-4)


def test_an_average_over_sets_has_the_interval_of_their_means():
    """Of 2 sets, the variance of the average is a quarter of the sum of the means' variances, whatever the sizes."""
    generator = np.random.default_rng(3)
    small, large = generator.random(30), generator.random(3000) + 5
    mean, low, high = average_bootstrap([small, large])
    assert mean == pytest.approx((small.mean() + large.mean()) / 2)
    deviation = np.sqrt(small.var() / 30 + large.var() / 3000) / 2
    assert high - low == pytest.approx(2 * 1.96 * deviation, rel=0.1)
    assert average_bootstrap([small]) == average_bootstrap([small])  # the same values, the same interval
    for none in ([], [small, []]):
        with pytest.raises(ValueError, match="no problems"):
            average_bootstrap(none)


def test_pairing_takes_out_what_problems_share():
    generator = np.random.default_rng(0)
    before = generator.random(200)
    after = before + 0.02 + generator.normal(0, 0.01, 200)
    mean, low, high = paired_bootstrap(before, after)
    assert mean == pytest.approx(np.mean(after) - np.mean(before))
    assert 0.015 < low < 0.02 < high < 0.025
    assert paired_bootstrap(after, before).high < 0
    with pytest.raises(ValueError, match="after: 199 entries, before has 200"):
        paired_bootstrap(before, after[1:])
