"""The exact allocation where one more rollout of a prompt is worth less than the one before."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

# (prompts int64 [M], rollouts of each float64 [M]) -> what one more is worth, float64 [M] above 0, falling in those
Gain = Callable[[np.ndarray, np.ndarray], np.ndarray]


def largest_gains(gain: Gain, prompts: int, budget: int, low: int, high: int) -> np.ndarray:
    """The counts that maximise a sum of concave values: rollouts go to the largest gains, ties to the lower index.

    int64 [prompts], sum `budget`, low <= n <= high; prompts low <= budget <= prompts high is given.
    """
    n = _below_optimum(gain, prompts, budget, low, high)
    while left := budget - int(n.sum()):
        open_ = np.flatnonzero(n < high)
        have = n[open_].astype(np.float64)
        now = gain(open_, have)
        after = np.where(have + 1 < high, gain(open_, have + 1), -np.inf)
        # A first gain above every second gain is among the next to be taken whatever the order of the rest.
        ready = np.flatnonzero(now > after.max())
        if not len(ready):  # so small that a first and its second gain are the same number
            ready = np.array([now.argmax()])
        ready = ready[np.argsort(-now[ready], kind="stable")[:left]]
        n[open_[ready]] += 1
    return n


def _below_optimum(gain: Gain, prompts: int, budget: int, low: int, high: int) -> np.ndarray:
    """Counts nowhere above the optimum and few rollouts short of it: all whose gain is above a threshold.

    Bisection on the threshold; only prompts whose count it still changes are asked.
    """
    fewest, most = np.full(prompts, low, np.int64), np.full(prompts, high, np.int64)
    everyone = np.arange(prompts)
    first, last = gain(everyone, fewest.astype(np.float64)), gain(everyone, most - 1.0)
    above, below = float(np.log(first.max())), float(np.log(max(last.min(), 1e-300)))
    for _ in range(64):
        between = np.flatnonzero(fewest < most)
        if int((most - fewest)[between].sum()) <= prompts // 64:
            break
        middle = (above + below) / 2
        trial = fewest.copy()
        trial[between] = _count(gain, between, fewest[between], most[between], np.exp(middle))
        if trial.sum() <= budget:
            fewest, above = trial, middle
        else:
            most, below = trial, middle
    return fewest


def _count(gain: Gain, prompts: np.ndarray, low: np.ndarray, high: np.ndarray, threshold: float) -> np.ndarray:
    """How many rollouts of each have a gain above `threshold`, between `low` and `high`, by bisection."""
    low, high = low.copy(), high.copy()
    while (open_ := np.flatnonzero(low < high)).size:
        middle = (low[open_] + high[open_]) // 2
        above = gain(prompts[open_], middle.astype(np.float64)) > threshold
        low[open_] = np.where(above, middle + 1, low[open_])
        high[open_] = np.where(above, high[open_], middle)
    return low
