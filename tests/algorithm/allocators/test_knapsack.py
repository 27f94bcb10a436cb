"""Knapsack RL's counts, against every allocation there is."""

import itertools

import numpy as np

from dynamo_megatron.algorithm.allocation import RolloutAllocator
from dynamo_megatron.algorithm.success import success_rate


def observed(outcomes, **config):
    """outcomes: prompt -> (right, wrong) rollouts."""
    allocator = RolloutAllocator({"kind": "knapsack", **config})
    rows = [
        (i, right) for i, both in outcomes.items() for right, n in zip((1.0, 0.0), both, strict=True) for _ in range(n)
    ]
    ids, right = (list(column) for column in zip(*rows, strict=True))
    allocator.observe(ids, right, np.array(right, bool), 1)
    return allocator


def every_allocation(size, budget, low, high):
    every = np.array(list(itertools.product(range(low, high + 1), repeat=size)))
    return every[every.sum(1) == budget]


def test_knapsack_is_the_maximum_over_every_allocation():
    rng = np.random.default_rng(0)
    for _ in range(60):
        trials = rng.integers(1, 9, 4)
        right = [int(rng.integers(0, n + 1)) for n in trials]
        outcomes = {f"p{i}": (k, int(n - k)) for i, (k, n) in enumerate(zip(right, trials, strict=True))}
        allocator = observed(outcomes, rollout_n_min=2, rollout_n_max=8)
        budget = int(rng.integers(8, 33))
        decision = allocator.decide(list(outcomes), budget, step=2)
        p = decision.variance

        def value(n, p=p):
            return ((1 - p**n - (1 - p) ** n) * p * (1 - p) ** 2).sum(-1)

        assert value(decision.counts) >= value(every_allocation(4, budget, 2, 8)).max() - 1e-15


def test_knapsack_goes_by_the_posterior_mean_and_to_the_hard_prompts():
    allocator = observed({"easy": (7, 1), "hard": (1, 7), "even": (4, 4)})
    decision = allocator.decide(["easy", "hard", "even"], 24, step=2)
    history = allocator.history
    want = success_rate(history.of(["easy", "hard", "even"]), history.pool())
    assert decision.variance.tolist() == want.tolist() and 7 / 8 > want[0] > 0.5 > want[1] > 1 / 8
    assert decision.counts[1] > decision.counts[2] > decision.counts[0]
