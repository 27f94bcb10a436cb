"""pass@k and intervals over problems: pure functions of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

RESAMPLES, LEVEL = 2000, 0.95  # of every interval


class Interval(NamedTuple):
    mean: float
    low: float
    high: float


def pass_at_k(samples: ArrayLike, successes: ArrayLike, k: int) -> np.ndarray:
    """Unbiased estimate of the probability that at least one of `k` responses to a problem is right, float64 [N].

    The estimate is 1 - C(n - c, k) / C(n, k) for c `successes` among n `samples`, int [N] each (arXiv 2107.03374).
    Raises ValueError naming an entry that does not satisfy 0 <= c <= n and 1 <= k <= n.
    """
    n, c = np.asarray(samples), np.asarray(successes)
    if (bad := np.flatnonzero((c < 0) | (c > n))).size:
        raise ValueError(f"successes: entry {bad[0]} is {c[bad[0]]} of {n[bad[0]]} samples")
    if k < 1 or (n < k).any():
        few = f"entry {np.argmax(n < k)} has {n[n < k][0]} samples" if (n < k).any() else "k is at least 1"
        raise ValueError(f"k: pass@{k} cannot be had, {few}")
    drawn = np.arange(k)
    # A product of k ratios, since the binomials would overflow. It is 0 where fewer than k responses are wrong.
    all_wrong = np.prod(((n - c)[:, None] - drawn) / (n[:, None] - drawn), axis=1)
    return 1.0 - all_wrong


def bootstrap(values: ArrayLike, *, least: float = 0.0) -> Interval:
    """The mean of `values`, float [N], one per problem, with its interval over the problems, as `average_bootstrap`."""
    return average_bootstrap([values], least=least)


def average_bootstrap(sets: Sequence[ArrayLike], *, least: float = 0.0) -> Interval:
    """The mean of the means of `sets`, float [N_s] each, one value per problem, from `least` to 1. Each set has the
    same weight.

    The interval is a percentile bootstrap: a resample draws each set's problems from that set. It says nothing of a set
    whose values are all equal. Another problem has another value with a probability of up to Wilson's bound for 0 of
    N_s; that widens the interval. Of problems that are all wrong, or all right, it is Wilson's interval. The same
    values give the same interval. Raises ValueError where there are no sets, or a set has no values.
    """
    values = [np.asarray(x, np.float64) for x in sets]
    if not values or not all(x.size for x in values):
        raise ValueError("values: no problems, so no mean and no interval")
    generator = np.random.default_rng(0)
    # One resample at a time: all indices at once would take RESAMPLES * N * 8 bytes.
    means = [np.mean([x[generator.integers(x.size, size=x.size)].mean() for x in values]) for _ in range(RESAMPLES)]
    mean = float(np.mean([x.mean() for x in values]))
    ends = mean - np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    for x in values:
        if np.ptp(x) < 1e-9:
            other = z**2 / (x.size + z**2)
            ends = np.copysign(np.hypot(ends, other * (x[0] - [least, 1.0]) / len(values)), [1.0, -1.0])
    return Interval(mean, *(mean - ends).tolist())


def paired_bootstrap(before: ArrayLike, after: ArrayLike) -> Interval:
    """`bootstrap` of after - before, float [N] each, where entry i of both belongs to the same problem.

    Raises ValueError where the two differ in length or are empty.
    """
    x, y = np.asarray(before, np.float64), np.asarray(after, np.float64)
    if x.shape != y.shape:
        raise ValueError(f"after: {y.size} entries, before has {x.size}; give one of each a problem")
    return bootstrap(y - x, least=-1.0)
