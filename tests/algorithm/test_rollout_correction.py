import math

import numpy as np
import pytest

from dynamo_megatron.algorithm.rollout_correction import correction_weights, importance_ratios, mismatch
from dynamo_megatron.config.method import RolloutCorrectionConfig


def plain(log_ratio, lengths, config):
    """One rollout, one token at a time."""
    weights, start = [], 0
    for length in lengths:
        part = log_ratio[start : start + length]
        start += length
        for d in part:
            ratio = math.exp(sum(part) if config.level == "sequence" else d)
            if config.kind == "truncate":
                weights.append(min(max(ratio, config.low), config.high))
            else:
                weights.append(ratio if config.low <= ratio <= config.high else 0.0)
    return weights


@pytest.mark.parametrize("kind", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("low", "high"), [(0.0, 2.0), (0.5, 1.5)])
def test_weights_against_a_loop(kind, level, low, high):
    rng = np.random.default_rng(0)
    lengths = np.array([5, 0, 1, 30, 4])
    log_ratio = rng.normal(0, 0.5, 40)
    config = RolloutCorrectionConfig(kind=kind, level=level, low=low, high=high)
    got = correction_weights(importance_ratios(log_ratio, lengths, level), config)
    np.testing.assert_allclose(got, plain(log_ratio, lengths, config), rtol=1e-12)
    assert (np.abs(got - importance_ratios(log_ratio, lengths, level)) > 1e-12).any()


def test_far_apart_stays_finite():
    ratios = importance_ratios(np.array([500.0, 500.0, -900.0]), np.array([2, 1]), "sequence")
    assert np.isfinite(ratios).all() and ratios[2] == 0


def test_mismatch():
    rng = np.random.default_rng(2)
    engine, policy = rng.dirichlet(np.ones(50)), rng.dirichlet(np.ones(50))
    tokens = rng.choice(50, 200_000, p=engine)
    d = np.log(policy / engine)[tokens]
    found = mismatch(d.astype(np.float32), np.full(1000, 200), RolloutCorrectionConfig(kind="mask", low=0.5, high=2.0))
    assert mismatch(d, np.full(1000, 200), None).keys() == {"kl", "ratio_max"}
    assert found["ratio_max"] == pytest.approx(np.exp(d.max()), rel=1e-5)
    outside = (np.exp(d) < 0.5) | (np.exp(d) > 2)
    assert found["truncated"] == pytest.approx(outside.mean(), abs=1e-9)
    assert found["weight_mean"] == pytest.approx((np.exp(d) * ~outside).mean(), rel=1e-5)
    d = 0.1 * d
    tilted = engine * (policy / engine) ** 0.1  # not normalised: k3 is then E[e^d - 1 - d] all the same
    want = (engine * (tilted / engine - 1 - np.log(tilted / engine))).sum()
    assert mismatch(d, np.full(1000, 200), None)["kl"] == pytest.approx(want, rel=0.02)
    # far apart: the plain mean, without a bound on the estimate
    assert mismatch(np.array([5.0, 0.0]), np.array([2]), None)["kl"] == pytest.approx((math.exp(5) - 6) / 2, rel=1e-12)
    assert mismatch(np.array([-30.0]), np.array([1]), None)["kl"] == pytest.approx(29.0, rel=1e-12)
    assert math.isfinite(mismatch(np.full(10, 900.0), np.array([10]), None)["kl"])
    assert mismatch(np.zeros(0), np.zeros(3, int), None) == {"kl": 0.0, "ratio_max": 0.0}
