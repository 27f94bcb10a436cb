"""Checks of the allocations' arguments, and the last correction of their counts."""

from __future__ import annotations

import numpy as np

from dynamo_megatron.algorithm.arrays import Array, to_numpy


def checked(values: Array, name: str, least: int, low: int, high: int) -> np.ndarray:
    """`values` as float64 [N]. Raises ValueError naming the bounds or the entry that is negative or not finite."""
    if not least <= low <= high:
        raise ValueError(
            f"rollout_n_min: {low}, rollout_n_max: {high}; expected {least} <= rollout_n_min <= rollout_n_max"
        )
    result = to_numpy(values, name).astype(np.float64)
    if (bad := np.flatnonzero(~(np.isfinite(result) & (result >= 0)))).size:
        raise ValueError(f"{name}: entry {bad[0]} is {result[bad[0]]}; expected a finite number, 0 or above")
    return result


def settle(n: np.ndarray, budget: int, low: int, high: int) -> np.ndarray:
    """Clips `n` to the bounds, then adds or removes rollouts one by one in index order, in turn, until the sum is
    `budget`."""
    n = np.clip(n, low, high)
    while missing := budget - int(n.sum()):
        step = 1 if missing > 0 else -1
        room = np.flatnonzero(n < high if step > 0 else n > low)
        n[room[: abs(missing)]] += step
    return n
