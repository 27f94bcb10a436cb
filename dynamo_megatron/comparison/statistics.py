"""Scores and costs of a comparison's arms, with intervals: pure functions of numbers. docs/analysis.md has the reasons.

An arm has R learning rates, all arms have the same S seeds, and every run has up to E evaluations, the first before
training. The figures below are of a choice of seeds (int [n], with repetitions where it is a resample). A run that
never reaches the target, or has failed, costs +inf; so does a rate at which one of the seeds has failed: a divergence
is never averaged away.

So an arm's learning rate is selected separately for every figure and in every resample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

UNITS = ("rollouts", "tokens", "seconds")
SHARES = (0.5, 0.9)  # of the control's gain
RESAMPLES, LEVEL = 2000, 0.95


@dataclass(frozen=True)
class Arm:
    scores: np.ndarray  # float64 [R, S, E]; NaN after a run's last evaluation; a failed run may have only NaN
    costs: np.ndarray  # float64 [R, S, E, UNITS]: the run's cost until the evaluation; finite
    failed: np.ndarray  # bool [R, S]

    @property
    def finals(self) -> np.ndarray:
        """The score of each run's last evaluation, -inf for a failed run, float64 [R, S]."""
        last = np.maximum(np.isfinite(self.scores).sum(axis=-1) - 1, 0)
        finals = np.take_along_axis(self.scores, last[..., None], axis=-1)[..., 0]
        return np.where(self.failed, -np.inf, finals)


@dataclass(frozen=True)
class Summary:
    """The figures of one choice of seeds. There are A arms, in the order of the mapping. Rates are indices into an
    arm's learning rates."""

    final_rate: np.ndarray  # int64 [A]
    final: np.ndarray  # float64 [A], mean over the seeds; -inf where every rate has a failed run
    start: float  # the control's mean score before training; NaN where it has no rate without a failed run
    targets: np.ndarray  # float64 [SHARES]; NaN where the control has gained nothing
    cost_rate: np.ndarray  # int64 [A, SHARES, UNITS]
    cost: np.ndarray  # float64 [A, SHARES, UNITS]


@dataclass(frozen=True)
class Findings:
    """By arm, estimates (value, low, high). `final`: its mean final score, float64 [3]. `difference`: that less the
    control's, float64 [3]. `ratio`: its cost over the control's, float64 [SHARES, UNITS, 3]; NaN: neither reaches the
    target."""

    summary: Summary
    final: dict[str, np.ndarray]
    difference: dict[str, np.ndarray]
    ratio: dict[str, np.ndarray]


def cost_to(arm: Arm, target: float) -> np.ndarray:
    """The cost of each run when it first reaches `target`, float64 [R, S, UNITS]; +inf: it never does, or failed."""
    reached = arm.scores >= target  # False for NaN
    first = reached.argmax(axis=-1)[..., None]
    before = np.maximum(first - 1, 0)
    low, high = (np.take_along_axis(arm.scores, i, axis=-1) for i in (before, first))
    share = np.divide(target - low, high - low, out=np.zeros(first.shape), where=(first > 0) & (high > low))
    spent, then = (np.take_along_axis(arm.costs, i[..., None], axis=-2)[..., 0, :] for i in (before, first))
    cost = spent + share * (then - spent)
    cost[~reached.any(axis=-1) | arm.failed] = np.inf
    return cost


def summarise(arms: Mapping[str, Arm], control: str, seeds: np.ndarray) -> Summary:
    """The figures for `seeds`: int [n], n >= 1, indices of the seeds. A seed that occurs k times counts k times."""
    means = [arm.finals[:, seeds].mean(axis=1) for arm in arms.values()]
    final_rate = np.array([mean.argmax() for mean in means])
    final = np.array([mean.max() for mean in means])
    reference = list(arms).index(control)
    start = float(arms[control].scores[final_rate[reference], seeds, 0].mean())
    gain = final[reference] - start
    targets = np.array([start + share * gain if gain > 0 else np.nan for share in SHARES])
    by_rate = [np.stack([_arm_cost(arm, target, seeds) for target in targets], axis=1) for arm in arms.values()]
    return Summary(
        final_rate,
        final,
        start,
        targets,
        cost_rate=np.array([cost.argmin(axis=0) for cost in by_rate]),
        cost=np.array([cost.min(axis=0) for cost in by_rate]),
    )


def _arm_cost(arm: Arm, target: float, seeds: np.ndarray) -> np.ndarray:
    """The arm's cost to `target` at each rate, float64 [R, UNITS]."""
    cost = np.median(cost_to(arm, target)[:, seeds], axis=1)
    cost[arm.failed[:, seeds].any(axis=1)] = np.inf
    return cost


def find(arms: Mapping[str, Arm], control: str) -> Findings:
    """The findings of all seeds, with percentile intervals of a bootstrap over the seeds, the same at each call.

    The bootstrap is paired: a resample has the same seeds in every arm. Each resample has its own target and learning
    rates. Where a ratio or difference is NaN in a resample, since both control and arm are infinite, the resample
    counts as the lowest value for the lower end and as the highest for the upper end.
    """
    count = arms[control].failed.shape[1]
    whole = summarise(arms, control, np.arange(count))
    drawn = np.sort(np.random.default_rng(0).integers(count, size=(RESAMPLES, count)), axis=1)
    different, which = np.unique(drawn, axis=0, return_inverse=True)  # few seeds have few different resamples
    summaries = [summarise(arms, control, seeds) for seeds in different]
    samples = [whole, *(summaries[i] for i in which.ravel())]
    reference = list(arms).index(control)
    final = _estimates(np.array([s.final for s in samples]), -np.inf)
    with np.errstate(invalid="ignore", divide="ignore"):  # inf / inf and inf - inf: NaN
        ratio = _estimates(np.array([s.cost / s.cost[reference] for s in samples]), 0.0)
        difference = _estimates(np.array([s.final - s.final[reference] for s in samples]), -np.inf)
    return Findings(whole, *(dict(zip(arms, each, strict=True)) for each in (final, difference, ratio)))


def _estimates(samples: np.ndarray, lowest: float) -> np.ndarray:
    """(value, low, high), [..., 3], of a value and its resamples, [1 + n, ...]. The interval's ends are order
    statistics, rounded outwards: no interpolation between infinities."""
    value, drawn, out = samples[0], samples[1:], (1 - LEVEL) / 2
    low = np.quantile(np.where(np.isnan(drawn), lowest, drawn), out, axis=0, method="lower")
    high = np.quantile(np.where(np.isnan(drawn), np.inf, drawn), 1 - out, axis=0, method="higher")
    return np.stack([value, low, high], axis=-1)
