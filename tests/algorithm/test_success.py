"""What the energies of a prompt's rollouts say of its variance."""

import numpy as np
import pytest
import torch

from dynamo_megatron.algorithm import success
from dynamo_megatron.algorithm.allocation import success_variance
from dynamo_megatron.algorithm.history import Statistics
from dynamo_megatron.algorithm.success import bernoulli, energy_variance

PRIOR = (0.5, 1.5)


def statistics(right, wrong, energy_right=None, energy_wrong=None):
    """Prompts of so many right and wrong rollouts and their summed energies; None: none is known."""
    right, wrong = np.array(right, float), np.array(wrong, float)
    none = np.zeros(len(right))
    rewards = (right + wrong, right, none, none)
    energies = (none, none) if energy_right is None else (right, np.array(energy_right, float))
    energies += (none, none) if energy_wrong is None else (wrong, np.array(energy_wrong, float))
    return Statistics([f"p{i}" for i in range(len(right))], *rewards, *energies, none, none)


def rate(prompts):
    return (PRIOR[0] + prompts.successes) / (sum(PRIOR) + prompts.trials)


def expectation(prompts, right, wrong):
    """E[p (1-p)^2 right(p) + (1-p) p^2 wrong(p)] by sampling the posterior."""
    a, b = PRIOR[0] + prompts.successes, PRIOR[1] + prompts.trials - prompts.successes
    p = np.random.default_rng(0).beta(a, b, (400_000, len(prompts)))
    return (p * (1 - p) ** 2 * right(p) + (1 - p) * p**2 * wrong(p)).mean(0)


RIGHT, WRONG = np.array([0, 1, 4, 7, 3, 2]), np.array([8, 7, 4, 1, 1, 0])


def test_without_energies_or_with_equal_ones_it_is_the_bernoulli_variance():
    prompts = statistics(RIGHT, WRONG)
    want = bernoulli(PRIOR[0] + RIGHT, PRIOR[1] + WRONG)
    np.testing.assert_allclose(energy_variance(prompts, prompts, PRIOR), want, rtol=1e-12)
    nothing = statistics([], [])
    np.testing.assert_allclose(energy_variance(prompts, nothing, PRIOR), want, rtol=1e-12)
    equal = statistics(RIGHT, WRONG, 3 * RIGHT, 3 * WRONG)
    np.testing.assert_allclose(energy_variance(equal, equal, PRIOR), 3 * want, rtol=1e-12)
    solved = statistics([4, 2], [0, 0], [8, 4], [0, 0])  # what no rollout shows is taken from the other kind
    want = 2 * bernoulli(PRIOR[0] + solved.successes, np.full(2, PRIOR[1]))
    np.testing.assert_allclose(energy_variance(solved, solved, PRIOR), want, rtol=1e-12)


def test_mean_energies_are_lines_in_the_success_rate():
    p = rate(statistics(RIGHT, WRONG))
    pool = statistics(RIGHT, WRONG, RIGHT * (5 - 4 * p), WRONG * (2 + 6 * p))
    unknown = statistics([0, 1], [0, 3])
    for prompts in (pool, unknown):
        want = expectation(prompts, lambda p: 5 - 4 * p, lambda p: 2 + 6 * p)
        np.testing.assert_allclose(energy_variance(prompts, pool, PRIOR), want, rtol=0.01)


def test_a_line_stays_above_0():
    p = rate(statistics([1, 9], [9, 1]))
    pool = statistics([1, 9], [9, 1], [9.0, 0.0], [9, 1])
    mean, centre = 0.9, (p[0] + 9 * p[1]) / 10
    steepest = 0.9 * mean / (1 - centre)
    line = lambda p: mean - steepest * (p - centre)  # noqa: E731
    assert line(1) == pytest.approx(0.1 * mean)
    new = statistics([0], [0])
    want = expectation(new, line, lambda p: 1 + 0 * p)
    np.testing.assert_allclose(energy_variance(new, pool, PRIOR), want, rtol=0.01)


def test_a_prompts_factor_is_what_its_right_and_wrong_rollouts_have_in_common():
    right = wrong = np.full(4, 4)
    factor = np.array([0.5, 0.5, 1.5, 1.5])
    own = statistics(right, wrong, 4 * factor, 4 * factor)
    base = bernoulli(PRIOR[0] + 4, PRIOR[1] + 4)
    # Rollouts of a prompt are all alike: shrunk by the least, one rollout's worth.
    np.testing.assert_allclose(energy_variance(own, own, PRIOR), base * (8 * factor + 1) / 9, rtol=1e-12)
    assert energy_variance(statistics([4], [4]), own, PRIOR) == pytest.approx(base), "nothing measured: the pool's"
    more, fewer = np.full(4, 6), np.full(4, 2)
    opposed = statistics(more, fewer, 6 * factor, 2 * factor[::-1])  # nothing in common: shrunk by the most
    base_of_both = bernoulli(PRIOR[0] + 6, PRIOR[1] + 2)
    ratio = (6 * factor + 2 * factor[::-1]) / 8
    want = base_of_both * (8 * ratio + 1000) / 1008
    np.testing.assert_allclose(energy_variance(opposed, opposed, PRIOR), want, rtol=1e-12)
    mixed = statistics(
        np.full(4, 4), np.full(4, 4), 4 * np.array([0.5, 1.0, 1.0, 1.5]), 4 * np.array([0.5, 0.5, 1.5, 1.5])
    )
    between = np.mean([0.25, 0.0, 0.0, 0.25])  # covariance of (-.5, 0, 0, .5) and (-.5, -.5, .5, .5)
    ratio = np.array([0.5, 0.75, 1.25, 1.5])
    within = 8 * np.mean((ratio - 1) ** 2) - 8 * between
    strength = within / between
    assert 1 < strength < 1000
    want = base * (8 * ratio + strength) / (8 + strength)
    np.testing.assert_allclose(energy_variance(mixed, mixed, PRIOR), want, rtol=1e-12)


def test_success_variance():
    got = success_variance(np.array([0, 1, 4, 1, 0]), np.array([8, 2, 8, 1, 0]))
    np.testing.assert_allclose(got, [0, 0.5, 16 / 56, np.nan, np.nan])
    rng = np.random.default_rng(0)
    assert success_variance(rng.binomial(5, 0.3, 200_000), np.full(200_000, 5)).mean() == pytest.approx(0.21, abs=1e-3)


def test_success_variance_of_bad_input_and_of_tensors():
    assert success_variance(torch.tensor([1]), torch.tensor([2])).item() == 0.5
    with pytest.raises(ValueError, match="successes: entry 0"):
        success_variance(np.array([3]), np.array([2]))


def test_beta_prior_recovers_the_truth_and_falls_back():
    rng = np.random.default_rng(0)
    trials = rng.integers(2, 25, 20_000).astype(float)
    for a, b in ((0.3, 0.3), (0.4, 1.2), (3.0, 3.0)):
        k = rng.binomial(trials.astype(int), rng.beta(a, b, len(trials))).astype(float)
        np.testing.assert_allclose(success.beta_prior(k, trials), (a, b), rtol=0.1)
    none = np.zeros(0)
    assert success.beta_prior(none, none) == (0.5, 0.5)
    assert sum(success.beta_prior(np.array([1.0]), np.array([4.0]))) == pytest.approx(1)  # one prompt: no spread
    assert sum(success.beta_prior(np.ones(5), np.ones(5))) == pytest.approx(1)  # single trials: no spread
    a, b = success.beta_prior(np.full(50, 4.0), np.full(50, 8.0))  # less spread than chance: all alike
    assert a == pytest.approx(b) and a + b == 1000
    a, b = success.beta_prior(np.repeat([0.0, 8.0], 50), np.full(100, 8.0))
    assert 0 < a + b < 0.3


def test_variance_models_are_the_posterior_expectations():
    rng = np.random.default_rng(0)
    a, b = np.array([0.5, 3.0, 9.0]), np.array([2.0, 3.0, 0.7])
    p = rng.beta(a, b, (400_000, 3))
    mean = a / (a + b)
    np.testing.assert_allclose(success.bernoulli(a, b), (p * (1 - p)).mean(0), rtol=0.01)
    want = (p * (1 - p) ** 2).mean(0) * (0.5 - np.log(mean)) + (p**2 * (1 - p)).mean(0) * (0.5 - np.log(1 - mean))
    np.testing.assert_allclose(success.surprise(a, b), want, rtol=0.01)
