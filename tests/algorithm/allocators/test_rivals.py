"""The published rules of others, by hand and against every allocation there is."""

import itertools

import numpy as np
import pytest

from dynamo_megatron.algorithm.allocation import RolloutAllocator
from dynamo_megatron.algorithm.allocators import proportional
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


@pytest.mark.parametrize(
    ("weight", "budget", "low", "high", "want"),
    [
        ([1, 2, 3], 12, 1, 10, [2, 4, 6]),
        ([1, 2, 30], 12, 1, 6, [2, 4, 6]),  # 6 of the third, the rest 1 : 2
        ([1, 1, 2], 10, 1, 10, [3, 2, 5]),  # 2.5, 2.5 and 5: ties to the lower index
        ([0, 0, 1], 12, 1, 6, [3, 3, 6]),
        ([0, 5, 5], 9, 1, 9, [1, 4, 4]),
        ([0, 0, 0], 8, 1, 6, [3, 3, 2]),
        ([1e-9, 1, 1], 4, 1, 2, [1, 2, 1]),
        ([1, 1, 4.2], 9, 1, 9, [2, 1, 6]),
    ],
)
def test_proportional(weight, budget, low, high, want):
    assert proportional(np.array(weight, float), budget, low, high).tolist() == want


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


def test_gvm_by_hand():
    outcomes = {"a": ([4.0, 16.0], [1.0] * 6), "b": ([9.0] * 4, [1.0] * 4), "never": ([], [2.0] * 8)}
    decision = observed("gvm", outcomes).decide(["a", "b", "never", "new"], 40, step=2)
    norms = np.sqrt([10, 9, (20 + 36) / 6])  # the root of the mean energy of right rollouts; "new": the pool's
    p = np.array([2 / 8, 4 / 8, 6 / 24])
    want = norms / np.sqrt(p + 1e-3 / p)
    np.testing.assert_allclose(decision.variance, [want[0], want[1], 0, want[2]], rtol=1e-12)
    share = 38 * want / want.sum()  # 2 are the least for the prompt without a right rollout
    assert decision.counts[2] == 2 and np.abs(decision.counts[[0, 1, 3]] - share).max() < 1


def test_cures_by_hand():
    outcomes = {"a": ([16.0, 16.0], [4.0] * 6), "b": ([1.0] * 4, [9.0] * 4), "solved": ([2.0] * 8, [])}
    decision = observed("cures", outcomes).decide(["a", "b", "solved"], 40, step=2)

    def sigma(p, right, wrong):  # E[G] and E[G^2] of right and of wrong rollouts: G and G^2
        q = 1 - p
        return np.sqrt(p * q**2 * right**2 + p**2 * q * wrong**2 - p**2 * q**2 * (right - wrong) ** 2)

    want = np.array([sigma(0.25, 4, 2), sigma(0.5, 1, 3), 0])
    np.testing.assert_allclose(decision.variance, want, rtol=1e-12)
    assert decision.counts[2] == 2 and np.abs(decision.counts - 38 * want / want.sum())[:2].max() < 1
