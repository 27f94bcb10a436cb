"""The test of every allocator, including the user's own: `check_allocator({"kind": "my_module:MyAllocator"})`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from dynamo_megatron.algorithm.allocation import RolloutAllocator
from dynamo_megatron.algorithm.history import MEASURES, REWARDS
from dynamo_megatron.config import AllocationConfig

DISTINCT = "forgotten in part"  # weights and rates are real numbers: no two prompts tie
BOUNDS = ((1, 1), (1, 5), (2, 24), (8, 24))
SIZES = (1, 2, 7, 40)


def check_allocator(config: AllocationConfig | Mapping[str, Any]) -> None:
    """Requests counts from the allocator of `config` in some hundred seeded cases; takes seconds.

    Prompts: one, few, many, one of them twice; never seen, all solved, none solved, seen and new ones, rewards that are
    not 0/1, energies and lengths known or not. Budgets: within the bounds, at them, and beyond both. Checked: the sum
    is the budget (with `cost: tokens` the tokens', to less than a rollout); the bounds; int64; a repeated call and a
    state that went through JSON give the same counts; a prompt's place in the batch changes its count by one rollout at
    most (ties). Raises ValueError naming the class, or AssertionError with the case.
    """
    config = AllocationConfig.model_validate(config)
    rng = np.random.default_rng(0)
    for low, high in BOUNDS:
        for size in SIZES:
            ids = [f"p{i}" for i in range(size)]
            least, most = size * low, size * high
            budgets = {
                "clip": [0, least, int(rng.integers(least, most + 1)), most, 2 * most + 1],
                "scale": [size, 2 * most + 1],  # beyond the bounds, which are scaled: `counts` gets the scaled ones
            }
            for on_shortfall, asked in budgets.items():
                update = {"rollout_n_min": low, "rollout_n_max": high, "on_shortfall": on_shortfall}
                for name, state in _states(rng, ids).items():
                    order = rng.permutation(size) if name == DISTINCT else np.arange(size)
                    case = f"{size} prompts, {name}, bounds {low}..{high}, {on_shortfall}"
                    _check(config.model_copy(update=update), state, ids, asked, order, case)


def _check(
    config: AllocationConfig,
    state: dict[str, Any],
    ids: list[str],
    budgets: list[int],
    order: np.ndarray,
    case: str,
) -> None:
    allocator, restored = RolloutAllocator(config), RolloutAllocator(config)
    allocator.load_state_dict(state)
    restored.load_state_dict(json.loads(json.dumps(state)))
    for budget in budgets:
        counts = allocator.allocate(ids, budget, step=1)
        again = restored.allocate(ids, budget, step=1)
        assert np.array_equal(counts, again), f"{case}, budget {budget}: {counts}, from the same state {again}"
        moved = allocator.allocate([ids[i] for i in order], budget, step=1)
        same = np.abs(counts[order] - moved).max() <= 1
        assert same, f"{case}, budget {budget}: {counts[order]}, in another order {moved}"
        twice = allocator.allocate([*ids[1:], ids[-1]], budget, step=1)
        same = config.cost == "tokens" or twice.sum() == counts.sum()  # the last prompt may have long responses
        assert same, f"{case}, budget {budget}: {counts.sum()} rollouts, then {twice.sum()}"


def _states(rng: np.random.Generator, ids: list[str]) -> dict[str, dict[str, Any]]:
    """What an allocator may have seen of the prompts: name of the case -> the state that the allocator resumes from."""
    size = len(ids)
    trials = rng.integers(1, 40, size).astype(float)
    successes = rng.binomial(trials.astype(int), rng.beta(0.3, 0.3, size)).astype(float)
    weights = trials + 40 + rng.uniform(size=size)
    rates = rng.uniform(0.1, 0.8, size)
    zeros, spread = np.zeros(size), successes * (1 - successes / trials)

    right, wrong = rng.gamma(2, 9, size), rng.gamma(2, 30, size)

    def state(seen: int, *columns: np.ndarray, measured: bool = False) -> dict[str, Any]:
        weights, successes = columns[:2]
        failures = weights - successes
        measures = (successes, right * successes, failures, wrong * failures, weights, 50 * right * weights)
        named = [*zip(REWARDS, columns, strict=True), *(zip(MEASURES, measures, strict=True) if measured else [])]
        return {"prompt_ids": ids[:seen], **{name: x[:seen].tolist() for name, x in named}}

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
