"""The published rules of others, by hand and against every allocation there is."""

import itertools

import numpy as np

from dynamo_megatron.algorithm.allocation import RolloutAllocator
from dynamo_megatron.algorithm.success import success_rate


def observed(kind, outcomes, **config):
    """outcomes: prompt -> (energies of its right rollouts, of its wrong ones)."""
    allocator = RolloutAllocator({"kind": kind, **config})
    rows = [(i, j == 0, s) for i, both in outcomes.items() for j in (0, 1) for s in both[j]]
    ids, right, energy = (list(column) for column in zip(*rows, strict=True))
    allocator.observe(ids, np.array(right, float), right, 1, energy=energy)
    return allocator


def every_allocation(size, budget, low, high):
    every = np.array(list(itertools.product(range(low, high + 1), repeat=size)))
    return every[every.sum(1) == budget]


def test_knapsack_is_the_maximum_over_every_allocation():
    rng = np.random.default_rng(0)
    for _ in range(60):
        trials = rng.integers(1, 9, 4)
        right = [int(rng.integers(0, n + 1)) for n in trials]
        outcomes = {
            f"p{i}": ([1.0] * k, [1.0] * int(n - k)) for i, (k, n) in enumerate(zip(right, trials, strict=True))
        }
        allocator = observed("knapsack", outcomes, rollout_n_min=2, rollout_n_max=8)
        budget = int(rng.integers(8, 33))
        decision = allocator.decide(list(outcomes), budget, step=2)
        p = decision.variance

        def value(n, p=p):
            return ((1 - p**n - (1 - p) ** n) * p * (1 - p) ** 2).sum(-1)

        assert value(decision.counts) >= value(every_allocation(4, budget, 2, 8)).max() - 1e-15


def test_knapsack_goes_by_the_posterior_mean_and_to_the_hard_prompts():
    outcomes = {"easy": ([1.0] * 7, [1.0]), "hard": ([1.0], [1.0] * 7), "even": ([1.0] * 4, [1.0] * 4)}
    allocator = observed("knapsack", outcomes)
    decision = allocator.decide(["easy", "hard", "even"], 24, step=2)
    history = allocator.history
    want = success_rate(history.of(["easy", "hard", "even"]), history.pool())
    assert decision.variance.tolist() == want.tolist() and 7 / 8 > want[0] > 0.5 > want[1] > 1 / 8
    assert decision.counts[1] > decision.counts[2] > decision.counts[0]


def test_cero_is_the_maximum_of_its_utility_and_catches_up():
    outcomes = {"often": ([1.0] * 6, [1.0] * 6), "once": ([1.0] * 2, [1.0] * 2), "solved": ([1.0] * 4, [])}
    allocator = observed("cero", outcomes, rollout_n_min=1, rollout_n_max=12, half_life=0.2)
    allocator.observe(["often"] * 4, [1.0, 0.0] * 2, [True, False] * 2, 2)
    ids = ["often", "once", "solved", "new"]
    so_far, decision = np.array([16, 4, 4, 0]), allocator.decide(ids, 24, step=3)  # 12 and 4: nothing is forgotten

    def utility(n):
        return (decision.variance * (so_far + n) / (so_far + n + 1)).sum(-1)

    every = every_allocation(4, 24, 1, 12)
    assert utility(decision.counts) >= utility(every).max() - 1e-15
    assert decision.counts[0] < decision.counts[1]
