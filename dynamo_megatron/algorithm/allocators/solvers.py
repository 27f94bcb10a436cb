"""What the allocators share: counts from gains, from weights, or spread evenly, and checks of their arguments."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dynamo_megatron.algorithm.arrays import Array, to_numpy

# Relative: counts that cost the budget exactly are not refused for the rounding of a sum.
ROUNDING = 1e-12


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


def spread(prompts: int, budget: int) -> np.ndarray:
    """The budget spread evenly, int64 [prompts]; the remainder goes to the lower indices."""
    return budget // prompts + (np.arange(prompts) < budget % prompts).astype(np.int64)


def settle(n: np.ndarray, budget: int, low: int, high: int) -> np.ndarray:
    """Clips `n` to the bounds, then adds or removes rollouts one by one in index order, in turn, until the sum is
    `budget`."""
    n = np.clip(n, low, high)
    while missing := budget - int(n.sum()):
        step = 1 if missing > 0 else -1
        room = np.flatnonzero(n < high if step > 0 else n > low)
        n[room[: abs(missing)]] += step
    return n


def largest_gains(
    gain: Callable[[np.ndarray], np.ndarray], price: np.ndarray, budget: float, low: int, high: int
) -> np.ndarray:
    """The counts that maximise a sum of concave values: int64 [N], low <= n <= high, sum price n <= budget.

    A rollout of prompt i costs price_i > 0. `gain`: numbers of rollouts, float64 [1, M] -> the value of one more
    rollout of each prompt, float64 [N, M], falling with the number. Takes the largest gains per price one by one, ties
    by the lower index, until the next one costs more than is left. So less than a rollout's price is left, unless all
    prompts have `high`. The caller ensures low sum price <= budget.
    """
    left = budget * (1 + ROUNDING) - low * float(price.sum())
    further = min(high - low, int(left / price.min()))  # of any one prompt
    if further <= 0:
        return np.full(len(price), low, np.int64)
    per_price = (gain(low + np.arange(further, dtype=np.float64)[None]) / price[:, None]).ravel()
    most = min(int(left / price.min()), per_price.size)  # the rollouts that can be paid for are among the largest
    threshold = np.partition(per_price, per_price.size - most)[per_price.size - most]
    above, tied = np.flatnonzero(per_price > threshold), np.flatnonzero(per_price == threshold)
    if price.min() < price.max():
        above = above[np.argsort(-per_price[above], kind="stable")]
    taken = np.concatenate([above, tied]) // further
    paid = int(np.searchsorted(np.cumsum(price[taken]), left, side="right"))
    return low + np.bincount(taken[:paid], minlength=len(price)).astype(np.int64)


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
