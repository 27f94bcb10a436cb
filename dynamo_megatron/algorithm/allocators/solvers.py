"""Counts of rollouts within a budget and bounds: by gains, by weights, as published, or spread evenly."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dynamo_megatron.algorithm.arrays import Array, like, to_numpy

# Relative: counts that cost the budget exactly are not refused for the rounding of a sum.
ROUNDING = 1e-12
LEAST_PRIORITY = 1e-8  # at or below it a prompt takes no part in the published proportional share


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


def neyman(variance: Array, budget: int, rollout_n_min: int, rollout_n_max: int) -> Array:
    """The exact integer minimiser of sum_i variance_i / n_i, int64 [N] (Neyman allocation, integer and bounded).

    sum n = budget clipped to [N rollout_n_min, N rollout_n_max], rollout_n_min <= n_i <= rollout_n_max. One rollout
    more for prompt i gains variance_i / (n (n + 1)), which falls with n, so taking the largest gains one by one is
    optimal; ties go to the lower index. Prompts of variance 0 get what the others have no room for, in index order.

    Raises ValueError for bounds that contradict each other or a variance that is negative or not finite.
    """
    v = checked(variance, "variance", 1, rollout_n_min, rollout_n_max)
    budget = min(max(budget, len(v) * rollout_n_min), len(v) * rollout_n_max)
    return like(priced(v, np.ones(len(v)), budget, rollout_n_min, rollout_n_max), variance)


def priced(variance: np.ndarray, price: np.ndarray, budget: float, low: int, high: int) -> np.ndarray:
    """As `neyman`, but a rollout of prompt i costs price_i > 0: int64 [N] with sum price n <= budget, up to rounding.

    No counts of at most the same cost have a smaller sum variance / n. (Counts that use up the rest may: a knapsack
    problem.) The caller ensures low sum price <= budget.
    """
    if not len(variance):
        return np.zeros(0, np.int64)
    return largest_gains(lambda n: variance[:, None] / (n * (n + 1)), price, budget, low, high)


def waterfill(
    sample_counts: Array,
    priority: Array,
    total_rollout_n: int,
    rollout_n_min: int,
    rollout_n_max: int,
    initial_budget: int,
) -> Array:
    """The allocation of the published code (GithubX-F/DynaMO-RL), kept within its bounds; int64 [N].

    `sample_counts`: the rollouts of each prompt so far. `priority` >= 0: what a prompt's share is proportional to.
    sum n = total_rollout_n clipped to [N rollout_n_min, N rollout_n_max]. First every prompt is brought to
    max(rollout_n_min, initial_budget) samples, then to the lower bound, then the rest is shared by priority. At last
    rollouts are added or removed one by one in index order until the sum fits (the published code breaks the bounds
    there).

    Raises ValueError for bounds or lengths that contradict each other and for entries that are negative or not finite.
    """
    share = checked(priority, "priority", 0, rollout_n_min, rollout_n_max)
    seen = to_numpy(sample_counts, "sample_counts")
    if seen.shape != share.shape:
        raise ValueError(f"sample_counts: {len(seen)} entries for {len(share)} priorities")
    if (bad := np.flatnonzero(~(np.isfinite(seen) & (seen >= 0)))).size:
        raise ValueError(f"sample_counts: entry {bad[0]} is {seen[bad[0]]}; expected a count")
    low, high = rollout_n_min, rollout_n_max
    budget = min(max(total_rollout_n, len(share) * low), len(share) * high)

    need = np.clip(max(low, initial_budget) - np.floor(seen).astype(np.int64), 0, high)
    n = need if need.sum() <= budget else _scale_down(need, budget, low)
    short = np.maximum(0, low - n)
    rest = budget - int(n.sum())
    if short.any():
        n = n + (short if short.sum() <= rest else short * rest // short.sum())
    n = _share_by_priority(n, share, budget, high)
    return like(settle(n, budget, low, high), priority)


def _scale_down(need: np.ndarray, budget: int, low: int) -> np.ndarray:
    """Scales `need` to the budget, with at least `low` each, then takes one off the largest until the sum fits."""
    n = np.maximum(need * budget // need.sum(), low)
    for _ in range(int(n.sum()) - budget):
        n[np.argmax(n)] -= 1
    return n


def _share_by_priority(n: np.ndarray, priority: np.ndarray, budget: int, high: int) -> np.ndarray:
    """Shares the rest in proportion to priority by largest remainders, capped at `high`, until no prompt has room."""
    n = n.copy()
    while (rest := budget - int(n.sum())) > 0:
        open_ = np.flatnonzero((n < high) & (priority > LEAST_PRIORITY))
        if not len(open_):
            break
        exact = rest * (priority[open_] / priority[open_].sum())
        whole = np.floor(exact).astype(np.int64)
        largest = np.argsort(-(exact - whole), kind="stable")[: max(0, rest - int(whole.sum()))]
        whole[largest] += 1
        n[open_] = np.minimum(n[open_] + whole, high)
    return n
