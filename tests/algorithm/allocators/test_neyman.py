import functools
import itertools

import numpy as np
import pytest
import torch

from dynamo_megatron.algorithm.allocation import RolloutAllocator, neyman
from dynamo_megatron.algorithm.allocators import priced


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


def test_with_prices_no_counts_that_cost_as_little_are_better():
    rng = np.random.default_rng(0)
    for _ in range(1500):
        size, low = int(rng.integers(1, 5)), int(rng.integers(1, 4))
        high = low + int(rng.integers(0, 6))
        every = np.array(list(itertools.product(range(low, high + 1), repeat=size)))
        variance, price = random_variance(rng, size), rng.choice([0.5, 1.0, 3.0, 7.25], size)
        budget = rng.uniform(low, 1.1 * high) * price.sum()
        n = priced(variance, price, budget, low, high)
        spent = price @ n
        assert n.dtype == np.int64 and n.min() >= low and n.max() <= high and spent <= budget * (1 + 1e-12)
        assert budget - spent < price.max() or (n == high).all()
        best = (variance / every[every @ price <= spent]).sum(1).min()
        assert (variance / n).sum() <= best * (1 + 1e-12)


def test_cost_tokens_holds_the_expected_tokens_and_shifts_rollouts_to_short_prompts():
    allocator = RolloutAllocator({"cost": "tokens", "variance_floor": 0.0})
    right = [True, False] * 6
    allocator.observe(["long"] * 6 + ["short"] * 6, right, right, 1, lengths=[60] * 6 + [10] * 6)
    decision = allocator.decide(["long", "short", "new"], 24, step=2)
    mean = 35
    assert decision.tokens.tolist() == [(360 + 4 * mean) / 10, (60 + 4 * mean) / 10, mean]  # 50, 20, 35
    # sqrt(v / price) x 24 x 35 / sum sqrt(v price): v is the same for the first two and less known of the third
    want = np.sqrt(decision.variance / decision.tokens)
    want *= 24 * 35 / (want * decision.tokens).sum()
    assert np.abs(decision.counts - want).max() < 1 and decision.counts[1] > decision.counts[0]
    spent = decision.counts @ decision.tokens
    assert 24 * 35 - 50 < spent <= 24 * 35
    assert [row["tokens"] for row in decision.rows()] == decision.tokens.tolist()
    unknown = RolloutAllocator({"cost": "tokens"}).decide(["a", "b"], 16, step=1)
    assert unknown.counts.tolist() == [8, 8] and unknown.tokens.tolist() == [1, 1]


def test_counts_that_cost_the_budget_exactly_fit_in_spite_of_rounding():
    rng = np.random.default_rng(0)
    for _ in range(300):
        price = rng.lognormal(5, 1, 30)
        for high in (3, 7):
            assert (priced(rng.uniform(size=30), price, 30 * high * price.mean(), 1, high) == high).all()


def test_cost_tokens_is_for_neyman():
    with pytest.raises(ValueError, match="cost: no option of kind uniform"):
        RolloutAllocator({"kind": "uniform", "cost": "tokens"})


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
