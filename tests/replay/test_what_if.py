"""The figures of a replay against numbers computed by hand."""

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
