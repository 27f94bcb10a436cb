import itertools
import time

import numpy as np
import pytest
import torch

from dynamo_megatron.algorithm.allocation import neyman, success_variance, waterfill

CASE = ("sample_counts", "priority", "total_rollout_n", "rollout_n_min", "rollout_n_max", "initial_budget")


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


def test_neyman_is_the_minimum_over_every_allocation():
    rng = np.random.default_rng(0)
    for _ in range(2000):
        size, low = rng.integers(1, 5), int(rng.integers(1, 4))
        high = low + int(rng.integers(0, 5))
        budget = int(rng.integers(0, size * high + 3))
        variance = random_variance(rng, size)
        n = neyman(variance, budget, low, high)
        total = min(max(budget, size * low), size * high)
        assert n.dtype == np.int64 and n.sum() == total and n.min() >= low and n.max() <= high
        every = np.array(list(itertools.product(range(low, high + 1), repeat=int(size))))
        best = (variance / every[every.sum(1) == total]).sum(1).min()
        assert (variance / n).sum() <= best * (1 + 1e-12)


def test_neyman_gives_ties_to_the_lower_index():
    rng = np.random.default_rng(1)
    for _ in range(500):
        size, low = int(rng.integers(1, 40)), int(rng.integers(1, 4))
        high = low + int(rng.integers(0, 30))
        budget = int(rng.integers(size * low, size * high + 1))
        variance = random_variance(rng, size)
        assert neyman(variance, budget, low, high).tolist() == greedy(variance, budget, low, high)


def test_neyman_is_fast():
    rng = np.random.default_rng(0)
    for variance in (rng.beta(0.3, 0.3, 10**6), np.ones(10**6), rng.choice([0.0, 0.1, 0.2], 10**6)):
        start = time.process_time()
        n = neyman(variance, 16 * 10**6, 2, 64)
        assert time.process_time() - start < 4, "seconds for a million prompts"
        assert n.sum() == 16 * 10**6 and n.min() >= 2 and n.max() <= 64


def test_waterfill_vectors(vectors):
    for case in vectors("allocation"):
        got = waterfill(np.array(case["sample_counts"]), np.array(case["priority"]), *(case[k] for k in CASE[2:]))
        assert got.tolist() == case["expected"]


def test_waterfill_keeps_budget_and_bounds():
    rng = np.random.default_rng(2)
    for _ in range(3000):
        size, low = int(rng.integers(1, 12)), int(rng.integers(0, 9))
        high = max(1, low + int(rng.integers(0, 12)))
        budget = int(rng.integers(0, size * high + 5))
        seen = rng.choice([0, 1, 5, 30], size)
        n = waterfill(seen, random_variance(rng, size), budget, low, high, int(rng.integers(0, 30)))
        assert n.dtype == np.int64 and n.min() >= low and n.max() <= high
        assert n.sum() == min(max(budget, size * low), size * high)


def test_waterfill_explores_then_follows_the_priority():
    # 8 for the prompt never seen, the lower bound for all, the rest by priority
    assert waterfill(np.array([0, 16, 16]), np.array([0.0, 0.1, 0.3]), 24, 4, 24, 8).tolist() == [8, 6, 10]
    # exploring two prompts takes all but one of the budget; the third still gets its lower bound, off the first
    assert waterfill(np.array([0, 0, 30]), np.array([0.0, 0.0, 1.0]), 17, 4, 24, 8).tolist() == [6, 7, 4]


def test_success_variance():
    got = success_variance(np.array([0, 1, 4, 1, 0]), np.array([8, 2, 8, 1, 0]))
    np.testing.assert_allclose(got, [0, 0.5, 16 / 56, np.nan, np.nan])
    rng = np.random.default_rng(0)
    assert success_variance(rng.binomial(5, 0.3, 200_000), np.full(200_000, 5)).mean() == pytest.approx(0.21, abs=1e-3)


def test_torch_in_torch_out():
    assert torch.equal(neyman(torch.tensor([1.0, 4.0]), 6, 1, 5), torch.tensor([2, 4]))
    assert torch.equal(waterfill(torch.zeros(2, dtype=torch.int64), torch.ones(2), 4, 1, 5, 1), torch.tensor([2, 2]))
    assert success_variance(torch.tensor([1]), torch.tensor([2])).item() == 0.5


def test_no_prompts():
    assert neyman(np.zeros(0), 5, 1, 4).shape == waterfill(np.zeros(0), np.zeros(0), 5, 1, 4, 2).shape == (0,)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: neyman(np.array([1.0, np.nan]), 4, 1, 4), "variance: entry 1"),
        (lambda: neyman(np.array([1.0, -1.0]), 4, 1, 4), "variance: entry 1"),
        (lambda: neyman(np.ones(2), 4, 0, 4), "rollout_n_min"),
        (lambda: neyman(np.ones(2), 4, 5, 4), "rollout_n_min"),
        (lambda: waterfill(np.zeros(2), np.array([np.inf, 0]), 4, 1, 4, 2), "priority: entry 0"),
        (lambda: waterfill(np.array([1, -1]), np.ones(2), 4, 1, 4, 2), "sample_counts: entry 1"),
        (lambda: waterfill(np.zeros(3), np.ones(2), 4, 1, 4, 2), "sample_counts"),
        (lambda: success_variance(np.array([3]), np.array([2])), "successes: entry 0"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
