"""The variance of a prompt's gradient from the energies of its rollouts.

A rollout's energy S = sum_t (1 - 2 pi_t + sum_v pi_v^2) is the squared norm of the gradient of its log-probability with
respect to the logits (the energy of OTB, arXiv 2602.07078). It tracks the squared norm with respect to all parameters.
Then a prompt's variance is E[(r - p)^2 S] = p (1-p)^2 m1 + (1-p) p^2 m0, with m1 and m0 the mean energies of right and
of wrong rollouts.

For most prompts only a few energies are known, and for hard prompts, whose right answers have the largest energies,
hardly any. So m1 and m0 are not measured prompt by prompt. Each is a line in p, fitted to the pool, and a prompt has
one factor for both lines, which is shrunk to 1 by an amount fitted to the pool. The published alternatives do not do
this: the papers estimate gradient norms from many rollouts of the same step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dynamo_megatron.algorithm.history import Statistics

# At both of its ends a line is at least this share of its mean.
LEAST_SHARE = 0.1
# Bounds of the fitted weight, in rollouts, of the factor 1 in every prompt's factor.
FACTOR_STRENGTH = (1.0, 1000.0)


class Line(NamedTuple):
    """Mean energy of rollouts of prompts with success rate p: `at_0` (1 - p) + `at_1` p."""

    at_0: float
    at_1: float

    def at(self, p: np.ndarray) -> np.ndarray:
        return self.at_0 * (1 - p) + self.at_1 * p


def energy_variance(prompts: Statistics, pool: Statistics, prior: tuple[float, float]) -> np.ndarray:
    """E[p (1-p)^2 m1 + (1-p) p^2 m0] of each of `prompts`, float64 [N].

    p has the Beta posterior of `prior` (a, b) and the prompt's successes. Without any measured energy: E[p(1-p)].
    """
    right, wrong = _lines(pool, prior)
    strength = _factor_strength(pool, prior, right, wrong)
    a, b = prior[0] + prompts.successes, prior[1] + prompts.trials - prompts.successes
    s = a + b
    pairs = a * b / (s * (s + 1) * (s + 2) * (s + 3))  # E[p^i (1-p)^j], i + j = 4, is this times what follows
    variance = pairs * (
        right.at_0 * (b + 1) * (b + 2) + (right.at_1 + wrong.at_0) * (a + 1) * (b + 1) + wrong.at_1 * (a + 1) * (a + 2)
    )
    ratio, trials = _to_expected(prompts, a / s, right, wrong)
    return variance * (trials * ratio + strength) / (trials + strength)


def measured_energies(prompts: Statistics, pool: Statistics) -> tuple[np.ndarray, np.ndarray]:
    """Mean energies of right and of wrong rollouts, float64 [N] each: as measured, not shrunk.

    The pool's where a prompt has none, and 1 where the pool has none.
    """
    means = []
    for kind in ("energy_right", "energy_wrong"):
        trials, energy = getattr(pool, f"{kind}_trials").sum(), getattr(pool, kind).sum()
        mean = np.full(len(prompts), energy / trials if trials > 0 else 1.0)
        measured = getattr(prompts, f"{kind}_trials")
        means.append(np.divide(getattr(prompts, kind), measured, out=mean, where=measured > 0))
    return means[0], means[1]


def _lines(pool: Statistics, prior: tuple[float, float]) -> tuple[Line, Line]:
    """The lines of right and of wrong rollouts. If only one kind was measured, its mean is the other's line; if neither
    was, both lines are 1."""
    p = _rate(pool, prior)
    sums = [(pool.energy_right_trials, pool.energy_right), (pool.energy_wrong_trials, pool.energy_wrong)]
    known = [energy.sum() / trials.sum() for trials, energy in sums if trials.sum() > 0]
    right, wrong = (_line(trials, energy, p) if trials.sum() > 0 else None for trials, energy in sums)
    other = Line(*([known[0] if known else 1.0] * 2))
    return right or other, wrong or other


def _line(trials: np.ndarray, energy: np.ndarray, p: np.ndarray) -> Line:
    """A line by least squares over rollouts. p is the posterior mean, so that errors in p do not flatten the line."""
    weight = trials.sum()
    centre, mean = (trials * p).sum() / weight, energy.sum() / weight
    spread = (trials * (p - centre) ** 2).sum()
    slope = ((p - centre) * energy).sum() / spread if spread > 1e-9 * weight else 0.0
    most = (1 - LEAST_SHARE) * mean
    slope = min(max(slope, -most / (1 - centre)), most / centre)
    return Line(mean - slope * centre, mean + slope * (1 - centre))


def _factor_strength(pool: Statistics, prior: tuple[float, float], right: Line, wrong: Line) -> float:
    """Variance of one rollout's factor / variance of the factors between prompts, in rollouts (empirical Bayes).

    The right and the wrong rollouts of a prompt have only the prompt's factor in common, so the covariance of their
    deviations is the variance between prompts.
    """
    n1, n0 = pool.energy_right_trials, pool.energy_wrong_trials
    p = _rate(pool, prior)
    expected = [n1 * right.at(p), n0 * wrong.at(p)]
    mixed = (expected[0] > 0) & (expected[1] > 0)
    if not mixed.any():
        return FACTOR_STRENGTH[1]
    weight = (n1 * n0)[mixed] / (n1 + n0)[mixed]
    deviations = [
        energy[mixed] / mean[mixed]
        for energy, mean in zip((pool.energy_right, pool.energy_wrong), expected, strict=True)
    ]
    x, y = (d - np.average(d, weights=weight) for d in deviations)
    between = float(np.average(x * y, weights=weight))
    ratio, trials = _to_expected(pool, p, right, wrong)
    within = float((trials * (ratio - 1) ** 2).sum() - trials.sum() * max(between, 0.0)) / np.count_nonzero(trials)
    low, high = FACTOR_STRENGTH
    return min(max(within / between, low), high) if between > 0 else high


def _to_expected(prompts: Statistics, p: np.ndarray, right: Line, wrong: Line) -> tuple[np.ndarray, np.ndarray]:
    """Each prompt's energy / the energy that the lines predict (1 if that is 0), and its rollouts of known energy."""
    n1, n0 = prompts.energy_right_trials, prompts.energy_wrong_trials
    expected = n1 * right.at(p) + n0 * wrong.at(p)
    energy = prompts.energy_right + prompts.energy_wrong
    return np.divide(energy, expected, out=np.ones(len(p)), where=expected > 0), n1 + n0


def _rate(prompts: Statistics, prior: tuple[float, float]) -> np.ndarray:
    return (prior[0] + prompts.successes) / (sum(prior) + prompts.trials)
