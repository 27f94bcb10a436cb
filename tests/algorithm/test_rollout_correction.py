import math

import numpy as np
import pytest

from dynamo_megatron.algorithm.rollout_correction import (
    correction_weights,
    importance_ratios,
    mean_gaps,
    mismatch,
    rejections,
)
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


LENGTHS = np.array([20, 1, 0, 3])
VERSIONS = np.full(24, 4)


@pytest.fixture
def pair():
    """(policy's logprobs, the engine's): bfloat16's noise, with one token in it that is 0.45 nats off."""
    rng = np.random.default_rng(0)
    engine = -rng.exponential(1.0, 24).astype(np.float32)
    policy = engine + rng.normal(0, 0.03, 24).astype(np.float32)
    policy[20] = engine[20] + 0.45
    return policy, engine


def test_noise_passes_also_in_a_response_of_one_token(pair):
    assert rejections(*pair, LENGTHS, VERSIONS, 4, 0.3) == {}
    assert mean_gaps(*pair, LENGTHS)[1] == pytest.approx(0.45 / 8)


def test_what_is_rejected_and_why(pair):
    policy, engine = pair
    assert rejections(policy, engine, LENGTHS, VERSIONS, 5, None).keys() == {0, 1, 3}
    older = VERSIONS.copy()
    older[21] = 3
    assert rejections(policy, engine, LENGTHS, older, 4, 0.3) == {3: "sampled from weight version 3 to 4, not 4"}
    assert rejections(policy, engine, LENGTHS, older, 3, 0.3)[3] == "sampled from weight version 3 to 4, not 3"
    engine[:20] = policy[:20] - 0.5
    engine[20] = -9.0
    found = rejections(policy, engine, LENGTHS, VERSIONS, 4, 0.3)
    assert found.keys() == {0, 1} and found[0] == "logprobs 0.5 nats from the policy's on average"
    assert rejections(policy, engine, LENGTHS, VERSIONS, 4, None) == {}


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
@pytest.mark.parametrize("both", [False, True])
def test_what_is_not_finite_is_always_rejected(pair, bad, both):
    policy, engine = pair
    engine[22] = bad
    if both:
        policy[22] = bad
    assert rejections(policy, engine, LENGTHS, VERSIONS, 4, None) == {3: "a logprob that is not finite"}


def test_an_unknown_version_is_none_that_the_bound_allows(pair):
    versions = np.array([1] * 20 + [-1, 0, 1, 1])
    found = rejections(*pair, LENGTHS, versions, 1, None, 3)
    assert found == {1: "sampled from weight version -1, not 0 to 1"}


def test_older_weights_within_the_bound_are_no_reason_and_their_gap_is_none(pair):
    policy, engine = pair
    versions = np.array([2] * 10 + [4] * 11 + [1, 2, 4])

    def found(version, staleness):
        return rejections(policy, engine, LENGTHS, versions, version, 0.3, staleness)

    engine[:10] = policy[:10] - 5.0  # of older weights: another policy
    assert found(4, 3) == {}
    assert found(4, 2) == {3: "sampled from weight version 1 to 4, not 2 to 4"}
    assert found(3, 2)[0] == "sampled from weight version 2 to 4, not 1 to 3"
    engine[10:20] = policy[10:20] - 0.5  # of the present ones
    assert found(4, 3) == {0: "logprobs 0.5 nats from the policy's on average"}
    engine[3] = np.nan
    assert found(4, 3) == {0: "a logprob that is not finite"}
