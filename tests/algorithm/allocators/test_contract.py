"""Every allocator, and the user's, keeps the contract; one that does not is named."""

import itertools
import json

import numpy as np
import pytest

from dynamo_megatron.algorithm.allocation import RolloutAllocator
from dynamo_megatron.algorithm.allocators import Allocator
from dynamo_megatron.algorithm.history import COLUMNS
from dynamo_megatron.config import AllocationConfig

DISTINCT = "forgotten in part"  # weights and rates are real numbers: no two prompts tie
BOUNDS = ((1, 1), (1, 5), (2, 24), (8, 24))
SIZES = (1, 2, 7, 40)
CONFIGS = [
    {"kind": "uniform"},
    {"kind": "waterfill", "power": "sigma2"},
    {"kind": "waterfill", "power": "sigma"},
    {"kind": "neyman", "variance_floor": 0.0},
    {"kind": "neyman", "variance": "empirical"},
    {"kind": "knapsack"},
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
    """Prompts: one, few, many, one of them twice; with and without history and energies. Budgets: within the bounds, at
    them, and beyond both. A repeated call and a state that went through JSON give the same counts, and a prompt's place
    in the batch changes its count by one rollout at most (ties). `allocate` itself checks sum, bounds and dtype.
    """
    config = AllocationConfig.model_validate(config)
    rng = np.random.default_rng(0)
    for (low, high), size in itertools.product(BOUNDS, SIZES):
        ids, least, most = [f"p{i}" for i in range(size)], size * low, size * high
        budgets = {
            "clip": [0, least, int(rng.integers(least, most + 1)), most, 2 * most + 1],
            "scale": [size, 2 * most + 1],  # beyond the bounds, which are scaled: `counts` gets the scaled ones
        }
        for (shortfall, asked), (name, state) in itertools.product(budgets.items(), histories(rng, ids).items()):
            bounds = {"rollout_n_min": low, "rollout_n_max": high, "on_shortfall": shortfall}
            allocator, restored = (RolloutAllocator(config.model_copy(update=bounds)) for _ in range(2))
            allocator.load_state_dict(state)
            restored.load_state_dict(json.loads(json.dumps(state)))
            order = rng.permutation(size) if name == DISTINCT else np.arange(size)
            for budget in asked:
                case = f"{size} prompts, {name}, bounds {low}..{high}, {shortfall}, budget {budget}"
                counts = allocator.allocate(ids, budget, step=1)
                again = restored.allocate(ids, budget, step=1)
                assert np.array_equal(counts, again), f"{case}: {counts}, from the same state {again}"
                moved = allocator.allocate([ids[i] for i in order], budget, step=1)
                same = np.abs(counts[order] - moved).max() <= 1
                assert same, f"{case}: {counts[order]}, in another order {moved}"
                allocator.allocate([*ids[1:], ids[-1]], budget, step=1)  # checks the sum: a prompt may occur twice


def histories(rng: np.random.Generator, ids: list[str]) -> dict[str, dict]:
    """What an allocator may have seen of the prompts: name of the case -> the state that the allocator resumes from."""
    size = len(ids)
    trials = rng.integers(1, 40, size).astype(float)
    successes = rng.binomial(trials.astype(int), rng.beta(0.3, 0.3, size)).astype(float)
    weights = trials + 40 + rng.uniform(size=size)
    rates = rng.uniform(0.1, 0.8, size)
    zeros, spread = np.zeros(size), successes * (1 - successes / trials)

    right, wrong = rng.gamma(2, 9, size), rng.gamma(2, 30, size)

    def state(seen: int, *columns: np.ndarray, measured: bool = False) -> dict:
        weights, successes = columns[:2]
        failures = weights - successes
        measures = (successes, right * successes, failures, wrong * failures)
        values = (*columns, *(m * measured for m in measures))
        named = {name: x[:seen].tolist() for name, x in zip(COLUMNS, values, strict=True)}
        return {"prompt_ids": ids[:seen], **named, "energy_line": [0.0] * 5}

    real = (weights, rates * weights, rng.normal(size=size), weights * rng.gamma(2, 1, size))
    return {
        "never seen": state(0, zeros, zeros, zeros, zeros),
        "all solved": state(size, trials, trials, zeros + 1, zeros, measured=True),
        "none solved": state(size, trials, zeros, zeros, zeros),
        "all seen": state(size, trials, successes, successes / trials, spread, measured=True),
        "half of them new": state(size // 2, trials, successes, successes / trials, spread, measured=True),
        DISTINCT: state(size, *real, measured=True),
        "no energies": state(size, *real),
    }


@pytest.mark.parametrize("config", CONFIGS[:-1], ids=lambda c: "-".join(map(str, c.values())))
def test_prompts_without_a_difference_get_the_same(config):
    allocator = RolloutAllocator(config)
    assert allocator.allocate(["a", "b", "c"], 26, step=1).tolist() == [9, 9, 8]
    assert not allocator.last.history.any()
    allocator.observe(["a", "b", "c"] * 4, [0.0, 0.0, 0.0] * 4, [False] * 12, 1)
    assert allocator.allocate(["a", "b", "c"], 24, step=2).tolist() == [8, 8, 8]


@pytest.mark.parametrize("budget", [3, 49])
def test_a_budget_beyond_the_bounds_is_an_error_unless_asked_for(budget):
    with pytest.raises(ValueError, match=f"budget: {budget} rollouts for 2 prompts"):
        RolloutAllocator({}).allocate(["a", "b"], budget, step=1)


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


@pytest.mark.parametrize(
    ("kind", "says"),
    [("neymann", "'neymann' is unknown"), ("numpy:zeros", "is no allocator"), ("no_such_module:A", "cannot import")],
)
def test_a_kind_that_is_none(kind, says):
    with pytest.raises(ValueError, match=says):
        RolloutAllocator({"kind": kind})
