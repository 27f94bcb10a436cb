"""The exact allocation if each further rollout of a prompt is worth less than the one before."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

# (prompts int64 [M], rollouts of each float64 [M]) -> value of one more rollout, float64 [M] > 0, falling with rollouts
Gain = Callable[[np.ndarray, np.ndarray], np.ndarray]

# The size of a sample of prompts, and how far (in the logarithm) from its threshold the search for all prompts begins.
SAMPLE = 8192
NEAR = 0.03
# If gains' logarithms differ by less than this, the rollouts are given one by one.
TIED = 1e-6


def largest_gains(gain: Gain, prompts: int, budget: int, low: int, high: int) -> np.ndarray:
    """The counts that maximise a sum of concave values: rollouts go to the largest gains, ties to the lower index.

    int64 [prompts], sum `budget`, low <= n <= high. The caller ensures prompts low <= budget <= prompts high.
    """
    n, _ = _below_optimum(gain, prompts, budget, low, high)
    while left := budget - int(n.sum()):
        open_ = np.flatnonzero(n < high)
        have = n[open_].astype(np.float64)
        now = gain(open_, have)
        after = np.where(have + 1 < high, gain(open_, have + 1), -np.inf)
        # A prompt's next gain that is above all gains after next is taken next, whatever the order of the rest.
        ready = np.flatnonzero(now > after.max())
        if not len(ready):  # so small that a prompt's next gain and the one after it are equal
            ready = np.array([now.argmax()])
        ready = ready[np.argsort(-now[ready], kind="stable")[:left]]
        n[open_[ready]] += 1
    return n


def _below_optimum(gain: Gain, prompts: int, budget: int, low: int, high: int) -> tuple[np.ndarray, float]:
    """Returns counts that are nowhere above the optimum and few rollouts short of it, namely all rollouts whose gain is
    above a threshold, and the logarithm of the threshold.

    Bisects the threshold, and computes gains only of prompts whose count can still change. If there are many prompts, a
    sample of them gives a first estimate of the threshold.
    """
    fewest, most = np.full(prompts, low, np.int64), np.full(prompts, high, np.int64)
    everyone = np.arange(prompts)
    first, last = gain(everyone, fewest.astype(np.float64)), gain(everyone, most - 1.0)
    above, below = float(np.log(first.max())), float(np.log(max(last.min(), 1e-300)))
    guesses: list[float] = []
    if prompts >= 2 * SAMPLE:
        sample = everyone[:: prompts // SAMPLE]
        share = budget * len(sample) // prompts
        _, guess = _below_optimum(lambda i, n: gain(sample[i], n), len(sample), share, low, high)
        guesses = [guess - NEAR, guess + NEAR]
    for _ in range(64):
        between = np.flatnonzero(fewest < most)
        if int((most - fewest)[between].sum()) <= prompts // 64 or above - below < TIED:
            break
        middle = guesses.pop() if guesses else above
        if not below < middle < above:
            middle = (above + below) / 2
        trial = fewest.copy()
        trial[between] = _count(gain, between, fewest[between], most[between], np.exp(middle))
        if trial.sum() <= budget:
            fewest, above = trial, middle
        else:
            most, below = trial, middle
    return fewest, above


def _count(gain: Gain, prompts: np.ndarray, low: np.ndarray, high: np.ndarray, threshold: float) -> np.ndarray:
    """Returns how many rollouts of each prompt have a gain above `threshold`, between `low` and `high`. For most
    prompts it is `low`; the others are found by bisection."""
    more = np.flatnonzero(gain(prompts, low.astype(np.float64)) > threshold)
    least, most = low[more] + 1, high[more]
    while (open_ := np.flatnonzero(least < most)).size:
        middle = (least[open_] + most[open_]) // 2
        above = gain(prompts[more[open_]], middle.astype(np.float64)) > threshold
        least[open_] = np.where(above, middle + 1, least[open_])
        most[open_] = np.where(above, most[open_], middle)
    count = low.copy()
    count[more] = least
    return count
