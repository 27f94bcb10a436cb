"""How many rollouts each prompt gets out of a budget: exact, deterministic, within the bounds."""

from __future__ import annotations

import heapq

import numpy as np

from dynamo_megatron.algorithm.arrays import Array, like, to_numpy

LEAST_PRIORITY = 1e-8  # at or below it a prompt takes no part in the published proportional share


def spread(prompts: int, budget: int) -> np.ndarray:
    """The budget spread evenly, int64 [prompts]; the remainder goes to the lower indices."""
    return budget // max(prompts, 1) + (np.arange(prompts) < budget % max(prompts, 1)).astype(np.int64)


def neyman(variance: Array, budget: int, rollout_n_min: int, rollout_n_max: int) -> Array:
    """The exact integer minimiser of sum_i variance_i / n_i, int64 [N] (Neyman allocation, integer and bounded).

    sum n = budget clipped to [N rollout_n_min, N rollout_n_max], rollout_n_min <= n_i <= rollout_n_max. One rollout
    more for prompt i gains variance_i / (n (n + 1)), which falls with n, so taking the largest gains one by one is
    optimal; ties go to the lower index. Prompts of variance 0 get what the others have no room for, in index order.

    Raises ValueError for bounds that contradict each other or a variance that is negative or not finite.
    """
    v = _checked(variance, "variance", 1, rollout_n_min, rollout_n_max)
    low, high = rollout_n_min, rollout_n_max
    budget = min(max(budget, len(v) * low), len(v) * high)
    n = _below_optimum(v, budget, low, high)
    assert n.sum() <= budget
    while left := budget - int(n.sum()):
        open_ = np.flatnonzero((n < high) & (v > 0))
        if not len(open_):
            return like(_fill_in_order(n, left, high), variance)
        have = n[open_].astype(np.float64)
        gain = v[open_] / (have * (have + 1))
        after = np.where(have + 1 < high, v[open_] / ((have + 1) * (have + 2)), -np.inf)
        # A first gain above every second gain is among the next to be taken whatever the order of the rest. There is
        # always one, unless the gains are so small (1e-300) that a first and its second gain are the same number.
        ready = np.flatnonzero(gain > after.max())
        if not len(ready):
            ready = np.array([gain.argmax()])
        if len(ready) > left:
            ready = ready[np.argsort(-gain[ready], kind="stable")[:left]]
        n[open_[ready]] += 1
    return like(n, variance)


def _below_optimum(v: np.ndarray, budget: int, low: int, high: int) -> np.ndarray:
    """Counts that are nowhere above the optimum and few rollouts short of it, by bisection on the gain.

    Taking every rollout that gains more than t = 1 / s leaves n with n (n + 1) >= v s. One less than that stays below
    the optimum in spite of rounding.
    """
    n = np.full(len(v), low, np.int64)
    positive = v[v > 0]
    if not len(positive) or budget <= low * len(v):
        return n

    def counts(log_s: float) -> np.ndarray:
        with np.errstate(over="ignore"):
            root = np.sqrt(1 + 4 * v * np.exp(log_s))
        return np.clip(np.ceil((root - 1) / 2), low, high)

    below = np.log(low) - np.log(positive.max())
    above = min(2 * np.log(high + 1) - np.log(positive.min()), 700.0)
    best = None
    for _ in range(64):
        middle = (below + above) / 2
        trial = counts(middle)
        missing = budget - trial.sum()
        if missing < 0:
            above = middle
            continue
        below, best = middle, trial
        if missing <= len(v) // 64:
            break
    return n if best is None else np.maximum(best.astype(np.int64) - 1, low)


def _fill_in_order(n: np.ndarray, left: int, high: int) -> np.ndarray:
    """`left` more, each prompt up to `high` before the next one."""
    room = high - n
    before = np.cumsum(room) - room
    return n + np.clip(left - before, 0, room)


def waterfill(
    sample_counts: Array,
    priority: Array,
    total_rollout_n: int,
    rollout_n_min: int,
    rollout_n_max: int,
    initial_budget: int,
) -> Array:
    """The allocation of the published code (GithubX-F/DynaMO-RL), kept within its bounds; int64 [N].

    `sample_counts` are the rollouts seen of each prompt so far, `priority` >= 0 what the share is proportional to.
    sum n = total_rollout_n clipped to [N rollout_n_min, N rollout_n_max]. First every prompt is brought to
    max(rollout_n_min, initial_budget) samples, then to the lower bound, then the rest is shared by priority, and what
    is left, or too much, goes or comes one by one in index order (the published code breaks the bounds there).

    Raises ValueError for bounds or lengths that contradict each other and for entries that are negative or not finite.
    """
    share = _checked(priority, "priority", 0, rollout_n_min, rollout_n_max)
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
    return like(_settle(n, budget, low, high), priority)


def _scale_down(need: np.ndarray, budget: int, low: int) -> np.ndarray:
    """`need` in proportion to the budget, at least `low`, then one off the largest until the budget holds."""
    n = np.maximum(need * budget // need.sum(), low)
    largest = [(-int(count), i) for i, count in enumerate(n) if count > low]
    heapq.heapify(largest)
    for _ in range(int(n.sum()) - budget):
        count, i = largest[0]
        n[i] -= 1
        if n[i] > low:
            heapq.heapreplace(largest, (count + 1, i))
        else:
            heapq.heappop(largest)
    return n


def _share_by_priority(n: np.ndarray, priority: np.ndarray, budget: int, high: int) -> np.ndarray:
    """Shares the rest in proportion to priority by largest remainders, capped at `high`, until nobody has room."""
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


def _settle(n: np.ndarray, budget: int, low: int, high: int) -> np.ndarray:
    """Into the bounds and onto the budget: one by one in index order, round after round."""
    n = np.clip(n, low, high)
    while missing := budget - int(n.sum()):
        step = 1 if missing > 0 else -1
        room = np.flatnonzero(n < high if step > 0 else n > low)
        n[room[: abs(missing)]] += step
    return n


def _checked(values: Array, name: str, least: int, low: int, high: int) -> np.ndarray:
    if not least <= low <= high:
        raise ValueError(
            f"rollout_n_min: {low}, rollout_n_max: {high}; expected {least} <= rollout_n_min <= rollout_n_max"
        )
    result = to_numpy(values, name).astype(np.float64)
    if (bad := np.flatnonzero(~(np.isfinite(result) & (result >= 0)))).size:
        raise ValueError(f"{name}: entry {bad[0]} is {result[bad[0]]}; expected a finite number, 0 or above")
    return result
