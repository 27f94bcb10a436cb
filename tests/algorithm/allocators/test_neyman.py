import functools

import numpy as np
import pytest
import torch

from dynamo_megatron.algorithm.allocation import neyman


def greedy(variance, budget, low, high):
    """One rollout at a time to the largest gain, ties to the lower index."""
    n = [low] * len(variance)
    for _ in range(min(max(budget, low * len(n)), high * len(n)) - sum(n)):
        gains = [v / (k * (k + 1)) if k < high else -1 for v, k in zip(variance, n, strict=True)]
        n[gains.index(max(gains))] += 1
    return n


def random_variance(rng, size):
    kind = rng.integers(5)
    if kind == 0:
        return rng.uniform(size=size)
    if kind == 1:
        return rng.choice([0.0, 0.1, 0.2], size)  # ties and zeros
    if kind == 2:
        return 10.0 ** rng.uniform(-300, 0, size)
    if kind == 3:
        return rng.integers(0, 7, size).astype(float)  # ties between different counts: 1/2 = 3/6
    return np.full(size, rng.choice([0.0, 0.25, 1e-320]))


@functools.cache
def every_allocation(size, total, low, high):
    """int64 [allocations, size]: all there are."""
    if size == 1:
        return np.array([[total]] if low <= total <= high else [], np.int64).reshape(-1, 1)
    rest = [every_allocation(size - 1, total - first, low, high) for first in range(low, high + 1)]
    return np.concatenate([np.insert(r, 0, low + k, axis=1) for k, r in enumerate(rest)])


def test_is_the_minimum_over_every_allocation():
    rng = np.random.default_rng(0)
    for _ in range(2500):
        size, low = int(rng.integers(1, 6)), int(rng.integers(1, 4))
        high = low + int(rng.integers(0, 18))
        budget = int(rng.integers(0, 21))
        variance = random_variance(rng, size)
        n = neyman(variance, budget, low, high)
        total = min(max(budget, size * low), size * high)
        assert n.dtype == np.int64 and n.sum() == total and n.min() >= low and n.max() <= high
        best = (variance / every_allocation(size, total, low, high)).sum(1).min()
        assert (variance / n).sum() <= best * (1 + 1e-12)


def test_gives_ties_to_the_lower_index():
    rng = np.random.default_rng(1)
    for _ in range(500):
        size, low = int(rng.integers(1, 40)), int(rng.integers(1, 4))
        high = low + int(rng.integers(0, 30))
        budget = int(rng.integers(size * low, size * high + 1))
        variance = random_variance(rng, size)
        assert neyman(variance, budget, low, high).tolist() == greedy(variance, budget, low, high)


def test_torch_in_torch_out_and_no_prompts():
    assert torch.equal(neyman(torch.tensor([1.0, 4.0]), 6, 1, 5), torch.tensor([2, 4]))
    assert neyman(np.zeros(0), 5, 1, 4).shape == (0,)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: neyman(np.array([1.0, np.nan]), 4, 1, 4), "variance: entry 1"),
        (lambda: neyman(np.array([1.0, -1.0]), 4, 1, 4), "variance: entry 1"),
        (lambda: neyman(np.ones(2), 4, 0, 4), "rollout_n_min"),
        (lambda: neyman(np.ones(2), 4, 5, 4), "rollout_n_min"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
