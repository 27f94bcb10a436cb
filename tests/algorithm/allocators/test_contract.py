"""Every allocator, and the user's, keeps the contract; one that does not is named."""

import numpy as np
import pytest

from dynamo_megatron.algorithm.allocation import RolloutAllocator
from dynamo_megatron.algorithm.allocators import BUILT_IN, Allocator, spread
from dynamo_megatron.algorithm.testing import check_allocator
from dynamo_megatron.config.method import ALLOCATORS

CONFIGS = [
    {"kind": "uniform"},
    {"kind": "waterfill", "power": "sigma2"},
    {"kind": "waterfill", "power": "sigma"},
    {"kind": "neyman", "variance_floor": 0.0},
    {"kind": "neyman", "variance": "empirical"},
    {"kind": "knapsack"},
    {"kind": "cero"},
    {"kind": "gvm"},
    {"kind": "cures"},
    {"kind": f"{__name__}:HardestFirst"},
]


class HardestFirst(Allocator):
    """The prompts with the lowest success rates get as much as they may have."""

    def counts(self, prompts, variance, budget, low, high):
        rate = prompts.successes / np.maximum(prompts.trials, 1)
        counts = np.full(len(prompts), low)
        left = budget - len(prompts) * low - (high - low) * np.arange(len(prompts))
        counts[np.argsort(rate, kind="stable")] += np.clip(left, 0, high - low)
        return counts


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "-".join(map(str, c.values())))
def test_contract(config):
    check_allocator(config)


@pytest.mark.parametrize("config", CONFIGS[:-1], ids=lambda c: "-".join(map(str, c.values())))
def test_prompts_without_a_difference_get_the_same(config):
    allocator = RolloutAllocator(config)
    assert allocator.allocate(["a", "b", "c"], 26, step=1).tolist() == [9, 9, 8]
    assert not allocator.last.history.any()
    allocator.observe(["a", "b", "c"] * 4, [0.0, 0.0, 0.0] * 4, [False] * 12, 1)
    assert allocator.allocate(["a", "b", "c"], 24, step=2).tolist() == [8, 8, 8]


def test_built_in_names_are_those_of_the_configuration():
    assert tuple(BUILT_IN) == ALLOCATORS


def test_a_budget_beyond_the_bounds_is_an_error_unless_asked_for():
    for config in CONFIGS:
        for budget in (3, 49):
            with pytest.raises(ValueError, match=f"budget: {budget} rollouts for 2 prompts"):
                RolloutAllocator(config).allocate(["a", "b"], budget, step=1)


class OneMore(HardestFirst):
    def counts(self, *arguments):
        return super().counts(*arguments) + np.eye(1, len(arguments[0]), len(arguments[0]) - 1, dtype=np.int64)[0]


class TooMany(Allocator):
    def counts(self, prompts, variance, budget, low, high):
        return np.diff(np.linspace(0, budget, len(prompts) + 1).astype(np.int64) ** 2 // budget)


class Halves(HardestFirst):
    def counts(self, *arguments):
        return super().counts(*arguments) / 1


class NaN(HardestFirst):
    def variance(self, prompts, pool):
        return np.where(np.arange(len(prompts)) == 1, np.nan, 1.0)


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (OneMore, "gave 42 rollouts in all for a budget of 41"),
        (TooMany, r"counts of prompt 'p0' is 0, outside \[2, 24\]"),
        (Halves, r"counts returned float64 \(8,\), not a numpy array of int64 \(8,\)"),
        (NaN, "variance of prompt 'p1' is nan"),
    ],
)
def test_a_broken_contract_names_the_class(broken, says):
    kind = f"{__name__}:{broken.__name__}"
    with pytest.raises(ValueError, match=f"algorithm.allocation.kind: {kind}: .*{says}"):
        RolloutAllocator({"kind": kind}).allocate([f"p{i}" for i in range(8)], 41, step=1)
    with pytest.raises(ValueError, match=kind):
        check_allocator({"kind": kind})


class FirstComesFirst(Allocator):
    def counts(self, prompts, variance, budget, low, high):
        counts = np.full(len(prompts), low)
        return counts + np.clip(budget - low * len(prompts) - (high - low) * np.arange(len(prompts)), 0, high - low)


class Moody(Allocator):
    asked = 0

    def counts(self, prompts, variance, budget, low, high):
        Moody.asked += 1
        return np.roll(spread(len(prompts), budget), Moody.asked)


@pytest.mark.parametrize(("broken", "says"), [(FirstComesFirst, "in another order"), (Moody, "from the same state")])
def test_what_only_the_contract_test_finds(broken, says):
    with pytest.raises(AssertionError, match=says):
        check_allocator({"kind": f"{__name__}:{broken.__name__}"})


@pytest.mark.parametrize(
    ("kind", "says"),
    [("neymann", "'neymann' is unknown"), ("numpy:zeros", "is no allocator"), ("no_such_module:A", "cannot import")],
)
def test_a_kind_that_is_none(kind, says):
    with pytest.raises(ValueError, match=says):
        RolloutAllocator({"kind": kind})
