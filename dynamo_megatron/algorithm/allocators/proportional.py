"""Counts in proportion to a weight, within bounds."""

from __future__ import annotations

import numpy as np

from dynamo_megatron.algorithm.allocators.checks import settle


def proportional(weight: np.ndarray, budget: int, low: int, high: int) -> np.ndarray:
    """int64 [N], sum `budget`, low <= n <= high, n as nearly in proportion to `weight` >= 0 as that allows.

    n_i is s weight_i clamped to the bounds, with s such that the sum is `budget`; fractions are rounded by the largest
    remainders. Rollouts that must go to prompts of weight 0 are given one by one in turn. The caller ensures
    N low <= budget <= N high.
    """
    if not weight.any():
        return settle(np.full(len(weight), low), budget, low, high)
    share = weight / weight.max()
    least = share[share > 0].min()
    below, above = 0.0, float(high)
    while np.clip(above * share, low, high).sum() <= budget and above * least < high:
        above *= 2
    while above - below > 1e-12 * above:
        middle = (below + above) / 2
        if np.clip(middle * share, low, high).sum() <= budget:
            below = middle
        else:
            above = middle
    exact = np.clip(below * share, low, high)
    whole = np.floor(exact).astype(np.int64)
    # Rounded, so that equal prompts have equal remainders wherever the bisection stopped.
    rest = np.round(np.where(share > 0, exact - whole, -1.0), 9)
    rest[whole == high] = -1.0
    order = np.argsort(-rest, kind="stable")
    largest = order[: min(max(budget - int(whole.sum()), 0), int((rest >= 0).sum()))]
    whole[largest] += 1
    return settle(whole, budget, low, high)
