"""The figures of a replay against numbers computed by hand."""

import numpy as np
from recorded import recorded_step

from dynamo_megatron.algorithm.allocation import RolloutAllocator
from dynamo_megatron.config import AllocationConfig
from dynamo_megatron.replay import what_if

BOUNDS = AllocationConfig(rollout_n_min=1, rollout_n_max=8)
# Of a: 1 of 4 right, of b: 1 of 2, of c: nothing ever came.
STEPS = [
    recorded_step(1, ["a", "b"], [3, 2], [[1.0, 0.0, 0.0], [1.0, 0.5]]),
    recorded_step(2, ["c", "a", "a"], [2, 1, 2], [[], [0.0], []]),
]


def test_success_rates_are_of_the_whole_record():
    assert what_if.success_rates(STEPS).tolist() == [0.25, 0.5, 2 / 6, 0.25, 0.25]


def test_measures_of_counts():
    rates, counts = np.array([0.5, 0.25, 0.0, 1.0]), np.array([2, 3, 1, 8])
    assert what_if.expected_variance(rates, counts).tolist() == [0.125, 0.0625, 0, 0]
    assert what_if.degenerate_chance(rates, counts).tolist() == [0.5, 28 / 64, 1, 1]


def test_oracle():
    """p(1-p) of .25, .0475 and 0 under a budget of 12: the gains are v / (n (n + 1)); then one where all is known."""
    steps = [
        recorded_step(1, ["a", "b", "c"], [4, 4, 4], [[], [], []]),
        recorded_step(2, ["c", "d"], [3, 3], [[], []]),
    ]
    rates = np.array([0.5, 0.95, 1.0, 1.0, 0.0])
    assert what_if.oracle(steps, rates, BOUNDS).tolist() == [8, 3, 1, 3, 3]
    # Brute force over everything that the first step's budget and bounds allow.
    counts = np.array([(a, b, 12 - a - b) for a in range(1, 9) for b in range(1, 9) if 1 <= 12 - a - b <= 8])
    best = counts[what_if.expected_variance(rates[:3], counts).sum(1).argmin()]
    assert what_if.oracle(steps, rates, BOUNDS)[:3].tolist() == best.tolist()


def test_a_replay_has_observed_the_earlier_steps_only():
    first = recorded_step(1, ["a", "b"], [4, 4], [[1.0] * 4, [1.0, 0.0] * 2])
    counts = what_if.replay([first, recorded_step(2, ["a", "b"], [5, 5], [[0.0] * 5, [0.0] * 5])], BOUNDS)
    allocator = RolloutAllocator(BOUNDS)
    assert counts[:2].tolist() == allocator.allocate(["a", "b"], 8, step=1).tolist() == [4, 4]
    rights = [1, 1, 1, 1, 1, 0, 1, 0]
    allocator.observe(["a"] * 4 + ["b"] * 4, rights, rights, 1)
    assert counts[2:].tolist() == allocator.allocate(["a", "b"], 10, step=2).tolist()
    assert counts[2] < counts[3] and counts[2:].sum() == 10


def test_first_difference():
    counts = what_if.given(STEPS)
    assert what_if.first_difference(STEPS, counts) is None
    counts[3] += 1
    assert what_if.first_difference(STEPS, counts) == (2, "a", 1, 2)
