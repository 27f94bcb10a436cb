"""Generalised advantage estimation, the value loss and explained variance, against loops written by hand."""

import numpy as np
import pytest
import torch

from dynamo_megatron.algorithm.gae import (
    explained_variance,
    generalised_advantages,
    token_rewards,
    value_loss,
    whitened,
)


def by_hand(rewards, values, lengths, gamma, lam):
    """The sums of arXiv 1506.02438, Eq. 16, term by term: no recursion."""
    advantages, start = [], 0
    for n in lengths:
        r, v = rewards[start : start + n], [*values[start : start + n], 0.0]
        deltas = [r[t] + gamma * v[t + 1] - v[t] for t in range(n)]
        for t in range(n):
            advantages.append(sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n)))
        start += n
    return np.array(advantages)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.97, 0.8), (1.0, 1.0), (0.9, 0.0)])
def test_gae_is_the_sum_of_discounted_errors(gamma, lam):
    rng = np.random.default_rng(0)
    for _ in range(20):
        lengths = rng.integers(0, 9, 6)
        rewards, values = rng.normal(size=(2, int(lengths.sum())))
        found = generalised_advantages(rewards, values, lengths, gamma, lam)
        expected = by_hand(rewards, values, lengths, gamma, lam)
        np.testing.assert_allclose(found.advantages, expected, rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(found.returns, found.advantages + values)


def test_without_discount_and_with_lambda_1_the_return_is_the_reward():
    rewards = token_rewards(np.array([1.0, 0.5]), np.array([3, 2]), [], 1.0)
    values = np.random.default_rng(0).normal(size=5)
    found = generalised_advantages(rewards, values, np.array([3, 2]), 1.0, 1.0)
    np.testing.assert_allclose(found.returns, [1, 1, 1, 0.5, 0.5])


def test_outcomes_come_with_the_last_token_and_process_rewards_with_their_own():
    process = np.array([0.5, np.nan, np.nan, 2.0, np.nan])
    found = token_rewards(np.array([1.0, -1.0, 7.0]), np.array([3, 2, 0]), [process], 0.1)
    np.testing.assert_allclose(found, [0.05, 0, 1.0, 0.2, -1.0])


def test_other_lengths_are_refused():
    with pytest.raises(ValueError, match="3 and 2 entries for 3 response tokens"):
        generalised_advantages(np.zeros(3), np.zeros(2), np.array([3]), 1.0, 1.0)


def test_whitened():
    values = np.array([1.0, 2.0, 4.0, 9.0])
    np.testing.assert_allclose(whitened(values), (values - 4) / np.sqrt(values.var(ddof=1) + 1e-8), rtol=1e-14)
    assert whitened(np.zeros(0)).shape == (0,) and whitened(np.array([3.0])).tolist() == [0.0]


def test_value_loss_holds_a_value_within_the_clip():
    """Old value 0, clip .2: beyond it the loss is of the held value where that is larger, and has no gradient."""
    values = torch.tensor([0.1, 0.5, 0.5, -0.5], dtype=torch.float64, requires_grad=True)
    returns, old = torch.tensor([1.0, 1.0, 0.0, -1.0], dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    loss, clipped = value_loss(values, old, returns, 0.2)
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    np.testing.assert_allclose(loss.detach(), [0.405, 0.32, 0.125, 0.32])
    np.testing.assert_allclose(gradient, [-0.9, 0.0, 0.5, 0.0])
    assert clipped.tolist() == [False, True, False, True]
    loss, clipped = value_loss(values, old, returns, None)
    np.testing.assert_allclose(loss.detach(), [0.405, 0.125, 0.125, 0.125])
    assert not clipped.any()


def test_explained_variance():
    returns = np.array([0.0, 1.0, 2.0])
    assert explained_variance(returns, returns) == 1 and explained_variance(np.full(3, 5.0), returns) == 0
    assert explained_variance(-returns, returns) == pytest.approx(-3)
    assert explained_variance(returns, np.ones(3)) == 0 and explained_variance(np.zeros(0), np.zeros(0)) == 0
