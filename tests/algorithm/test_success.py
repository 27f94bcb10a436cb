"""Estimates from a prompt's rollouts so far."""

import numpy as np
import pytest

from dynamo_megatron.algorithm import success
from dynamo_megatron.algorithm.allocation import success_variance


def test_success_variance():
    got = success_variance(np.array([0, 1, 4, 1, 0]), np.array([8, 2, 8, 1, 0]))
    np.testing.assert_allclose(got, [0, 0.5, 16 / 56, np.nan, np.nan])
    rng = np.random.default_rng(0)
    assert success_variance(rng.binomial(5, 0.3, 200_000), np.full(200_000, 5)).mean() == pytest.approx(0.21, abs=1e-3)


def test_beta_prior_recovers_the_truth_and_falls_back():
    rng = np.random.default_rng(0)
    for a, b in ((0.3, 0.3), (0.4, 1.2), (3.0, 3.0)):
        p = rng.beta(a, b, 20_000)
        k = rng.binomial(8, p)
        further = np.where((k > 0) & (k < 8), 24, 8)  # as an allocator does
        k += rng.binomial(further, p)
        np.testing.assert_allclose(success.beta_prior(k * 1.0, 8.0 + further), (a, b), rtol=0.1)
    none = np.zeros(0)
    assert success.beta_prior(none, none) == (0.5, 0.5)
    assert sum(success.beta_prior(np.array([1.0]), np.array([4.0]))) == pytest.approx(1)  # one prompt: no spread
    assert sum(success.beta_prior(np.ones(5), np.ones(5))) == pytest.approx(1)  # single trials: no spread
    a, b = success.beta_prior(np.full(50, 4.0), np.full(50, 8.0))  # less spread than chance: all alike
    assert a == pytest.approx(b) and a + b == 1000
    a, b = success.beta_prior(np.repeat([0.0, 8.0], 50), np.full(100, 8.0))
    assert 0 < a + b < 0.3


def test_the_bernoulli_variance_is_the_posterior_expectation():
    a, b = np.array([0.5, 3.0, 9.0]), np.array([2.0, 3.0, 0.7])
    p = np.random.default_rng(0).beta(a, b, (400_000, 3))
    np.testing.assert_allclose(success.bernoulli(a, b), (p * (1 - p)).mean(0), rtol=0.01)
