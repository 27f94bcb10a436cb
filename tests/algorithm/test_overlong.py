import numpy as np
import pytest

from dynamo_megatron.algorithm.advantages import group_advantages, overlong_penalty


def test_the_published_sizes():
    """L_max 20480, L_cache 4096 (arXiv 2503.14476, Eq. 13)."""

    def published(length):
        if length <= 16384:
            return 0.0
        return (16384 - length) / 4096 if length <= 20480 else -1.0

    lengths = np.array([0, 1, 16384, 16385, 18432, 20479, 20480, 30000])
    np.testing.assert_allclose(overlong_penalty(lengths, 20480, 0.2, 1.0), [published(n) for n in lengths], rtol=1e-12)


def test_a_short_limit_has_a_buffer_of_a_fraction_of_a_token():
    np.testing.assert_allclose(overlong_penalty(np.array([4, 5, 6]), 6, 0.2, 1.0), [0, -1 / 6, -1], atol=1e-12)
    assert overlong_penalty(np.array([3]), 6, 1.0, 1.0)[0] == pytest.approx(-0.5)


def test_half_of_it_means_the_same_for_rewards_of_0_and_1():
    """Advantages of DAPO's rewards of -1 and 1 with a penalty of at most 1."""
    right, lengths, groups = np.array([1, 1, 0, 0, 1]), np.array([10, 20, 18, 20, 17]), ["a"] * 5
    theirs = 2.0 * right - 1 + overlong_penalty(lengths, 20, 0.2, 1.0)
    ours = right + overlong_penalty(lengths, 20, 0.2, 0.5)
    advantages = [group_advantages(rewards, groups, "grpo", eps=0.0) for rewards in (theirs, ours)]
    np.testing.assert_allclose(*advantages, atol=1e-12)
