"""Leave-one-out baselines shrunk to history: by hand, unbiased whatever the history, of least variance."""

import itertools

import numpy as np
import pytest

from dynamo_megatron.algorithm.advantages import group_advantages, history_advantages


def test_by_hand():
    """a: mean .5 of 2 rollouts, rewards 1, 0, 1. b: mean .25 of 3 rollouts, one reward 1. c: nothing known, alone."""
    groups, rewards = ["a", "b", "a", "c", "a"], [1.0, 1.0, 0.0, 1.0, 1.0]
    mean, strength = [0.5, 0.25, 0.5, 0.7, 0.5], [2, 3, 2, 0, 2]
    advantages = history_advantages(rewards, groups, mean, strength)
    np.testing.assert_allclose(advantages, [1 - 2 / 4, 1 - 0.25, 0 - 3 / 4, 0, 1 - 2 / 4])


def test_by_hand_with_the_optimal_baseline():
    """p = .5 for the first: .5 / (.5 + .5 3) = .25."""
    advantages = history_advantages([1.0, 0.0, 1.0], ["a", "a", "b"], [0.5, 0.5, 0.2], [1, 1, 1], 3.0)
    p = np.array([0.25, 0.75, 0.2])
    np.testing.assert_allclose(advantages, [1, 0, 1] - p / (p + (1 - p) * 3))


def test_without_history_it_is_rloo():
    rng = np.random.default_rng(0)
    rewards, groups = rng.normal(size=50), rng.integers(0, 8, 50)
    ours = history_advantages(rewards, groups, np.full(50, 0.3), np.zeros(50))
    np.testing.assert_allclose(ours, group_advantages(rewards, groups, "rloo"), atol=1e-12)


@pytest.mark.parametrize("score_ratio", [1.0, 0.5, 3.0, 8.0])
@pytest.mark.parametrize(
    ("n", "mean", "strength"),
    [
        *itertools.product([1, 2, 5, 8], [0.02, 0.5, 0.98, 1.3], [0.3, 1.0, 16.0]),
        *((n, 0.0, 0.0) for n in (2, 5, 8)),  # a group of one, of which nothing is known, has the advantage 0
    ],
)
def test_unbiased(n, mean, strength, score_ratio):
    """The expected pull on a rollout's score is the gradient of p times E[A | r = 1] - E[A | r = 0], which has to be 1:
    over all outcomes of the group, for a success rate that no history knows."""
    p, pull = 0.3, 0.0
    for others in itertools.product([0.0, 1.0], repeat=n - 1):
        chance = np.prod([p if r else 1 - p for r in others])
        for own, sign in ((1.0, 1), (0.0, -1)):
            rewards = [own, *others]
            advantages = history_advantages(rewards, [0] * n, [mean] * n, [strength] * n, score_ratio)
            pull += chance * sign * advantages[0]
    assert pull == pytest.approx(1, abs=1e-12)


def test_graded_rewards_by_hand():
    """p = .4, variance .04, S(r) = 3 - 2 r, so rho = 3: E[S r] / E[S] = (3 p - 2 (p^2 + .04)) / (3 - 2 p)."""
    advantage = history_advantages([0.9], ["a"], [0.4], [5.0], 3.0, reward_variance=0.04)
    assert advantage[0] == pytest.approx(0.9 - (3 * 0.4 - 2 * (0.16 + 0.04)) / (3 - 0.8))


def test_graded_rewards_that_vary_as_much_as_they_can_are_0_and_1():
    rewards, groups, mean, strength = [1.0, 0.0, 0.0], [0, 0, 0], [0.4] * 3, [2.0] * 3
    most = history_advantages(rewards, groups, mean, strength, 4.0, reward_variance=9.0)
    np.testing.assert_allclose(most, history_advantages(rewards, groups, mean, strength, 4.0))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rewards": [1.0, np.nan]}, "rewards: entry 1 is nan"),
        ({"rewards": [1.0, 1.5], "score_ratio": 2.0}, "rewards: entry 1 is 1.5; the optimal baseline"),
        ({"prior_mean": [0.5]}, "prior_mean, prior_strength: 1 and 2 entries for 2 rollouts"),
        ({"prior_mean": [0.5, 0.6]}, "prior_mean: rollouts of one group have different values"),
    ],
)
def test_bad_input_is_named(change, says):
    good = {"rewards": [1.0, 0.0], "group_ids": [0, 0], "prior_mean": [0.5, 0.5], "prior_strength": [1.0, 1.0]}
    with pytest.raises(ValueError) as error:
        history_advantages(**(good | change))
    assert str(error.value).startswith(says)
