"""pass@k and bootstrap intervals over problems: pure functions of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike


class Interval(NamedTuple):
    mean: float
    low: float
    high: float


def pass_at_k(samples: ArrayLike, successes: ArrayLike, k: int) -> np.ndarray:
    """Unbiased probability that at least one of `k` responses to a problem is right, float64 [N].

    1 - C(n - c, k) / C(n, k) for c `successes` among n `samples`, int [N] each (arXiv 2107.03374). Raises ValueError
    naming the entry where 0 <= c <= n and 1 <= k <= n do not hold.
    """
    n, c = np.asarray(samples), np.asarray(successes)
    if n.shape != c.shape:
        raise ValueError(f"successes: {c.size} entries for {n.size} of samples")
    if (bad := np.flatnonzero((c < 0) | (c > n))).size:
        raise ValueError(f"successes: entry {bad[0]} is {c[bad[0]]} of {n[bad[0]]} samples")
    if k < 1 or (n < k).any():
        few = f"entry {np.argmax(n < k)} has {n[n < k][0]} samples" if (n < k).any() else "k is at least 1"
        raise ValueError(f"k: pass@{k} cannot be had, {few}")
    drawn = np.arange(k)
    # A product of k ratios, for the binomials overflow. It passes through 0 where fewer than k responses are wrong.
    all_wrong = np.prod(np.maximum((n - c)[:, None] - drawn, 0) / (n[:, None] - drawn), axis=1)
    return 1.0 - all_wrong


def bootstrap(values: ArrayLike, *, resamples: int = 2000, seed: int = 0, level: float = 0.95) -> Interval:
    """The mean of `values`, float [N], one a problem, with its percentile bootstrap interval over the problems.

    Equal values give an interval without width: a sample without spread says nothing about spread. The same seed gives
    the same interval. Raises ValueError without values.
    """
    return average_bootstrap([values], resamples=resamples, seed=seed, level=level)


def average_bootstrap(
    sets: Sequence[ArrayLike], *, resamples: int = 2000, seed: int = 0, level: float = 0.95
) -> Interval:
    """The mean of the means of `sets`, float [N_s] each, one a problem: every set has the same weight, whatever N_s.

    The interval is as that of `bootstrap`; a resample draws the problems of each set from this set. Raises ValueError
    without sets or where one has no values.
    """
    values = [np.asarray(x, np.float64) for x in sets]
    if not values or not all(x.size for x in values):
        raise ValueError("values: no problems, so no mean and no interval")
    generator = np.random.default_rng(seed)
    # One resample at a time: all indices at once would take resamples * N * 8 bytes.
    means = [np.mean([x[generator.integers(x.size, size=x.size)].mean() for x in values]) for _ in range(resamples)]
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(np.mean([x.mean() for x in values])), float(low), float(high))


def paired_bootstrap(
    before: ArrayLike, after: ArrayLike, *, resamples: int = 2000, seed: int = 0, level: float = 0.95
) -> Interval:
    """`bootstrap` of after - before, float [N] each, where entry i of both is about the same problem.

    Raises ValueError where the two differ in length or are empty.
    """
    x, y = np.asarray(before, np.float64), np.asarray(after, np.float64)
    if x.shape != y.shape:
        raise ValueError(f"after: {y.size} entries, before has {x.size}; give one of each a problem")
    return bootstrap(y - x, resamples=resamples, seed=seed, level=level)
