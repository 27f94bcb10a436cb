"""Estimates of a prompt's success rate, of the variance of its rewards and of its expected reward, from its rollouts so
far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dynamo_megatron.algorithm.arrays import Array, like, to_numpy
from dynamo_megatron.algorithm.history import Statistics

# Prior strength a + b in rollouts: the bounds of a fit, and the value if nothing can be fitted.
STRENGTH_RANGE = (0.1, 1000.0)
STRENGTH_UNKNOWN = 1.0
# The weight, in rollouts, of the pool's variance in that of every prompt.
POOL_ROLLOUTS = 4.0


def success_variance(successes: Array, trials: Array) -> Array:
    """Unbiased estimate of p(1 - p) from k successes in G trials: k(G - k) / (G(G - 1)), float64 [N], NaN where G < 2.
    Raises ValueError naming the entry where 0 <= k <= G does not hold."""
    k, g = to_numpy(successes, "successes").astype(np.float64), to_numpy(trials, "trials").astype(np.float64)
    if k.shape != g.shape:
        raise ValueError(f"successes: {len(k)} entries for {len(g)} trials")
    if (bad := np.flatnonzero(~(np.isfinite(g) & (k >= 0) & (k <= g)))).size:
        raise ValueError(f"successes: entry {bad[0]} is {k[bad[0]]} of {g[bad[0]]} trials")
    pairs = np.where(g >= 2, g * (g - 1), np.nan)
    return like(k * (g - k) / pairs, successes)


def beta_prior(successes: np.ndarray, trials: np.ndarray) -> tuple[float, float]:
    """(a, b) of a Beta prior fitted to prompts with `trials` > 0 by the moments of the beta-binomial (empirical Bayes).
    The mean is kept away from 0 and 1 by half a rollout each."""
    mean, strength = _fitted(successes / trials, trials, None, STRENGTH_RANGE, STRENGTH_UNKNOWN)
    total = _sum(trials)
    mean = (total * mean + 0.5) / (total + 1)
    return mean * strength, (1 - mean) * strength


def _fitted(
    means: np.ndarray, trials: np.ndarray, within: float | None, bounds: tuple[float, float], strength: float
) -> tuple[float, float]:
    """Returns the mean of the prompts' expected rewards, and its strength: the variance within over that between
    prompts, or `strength` if that can't be fitted. `means`: each prompt's mean reward, float64 [N].

    The variance of a prompt's mean is between + within / t, so its weight is w = t / (t + strength) (Kleinman 1973);
    weights of t would favour the prompts that the allocator does. The expectation of sum w (mean - centre)^2 is
    between sum f + within sum f / t, f = w - w^2 / sum w. `within` None: the rewards are 0 or 1, and both variances
    add up to centre (1 - centre).
    """
    weight, centre = trials, 0.5
    for _ in range(3 if len(trials) else 0):  # from 200 prompts on a fourth changes little
        total = _sum(weight)
        centre = _sum(weight * means) / total
        free = weight - weight**2 / total
        spread, noise, excess = _sum(weight * (means - centre) ** 2), _sum(free / trials), _sum(free)
        known, excess = (centre * (1 - centre), excess - noise) if within is None else (within, excess)
        if excess <= 1e-9:
            break
        between = (spread - known * noise) / excess
        inside = known - between if within is None else within
        strength = min(max(inside / between, bounds[0]), bounds[1]) if between > 0 else bounds[1]
        weight = trials / (trials + strength)
    return centre, strength


def bernoulli(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """E[p(1 - p)] under Beta(a, b)."""
    return a * b / ((a + b) * (a + b + 1))


def expected_variance(model: str, prompts: Statistics, pool: Statistics) -> np.ndarray:
    """The expected variance of a rollout of each of `prompts`, float64 [N], by `model`: `bernoulli`, or `empirical`,
    the sample variance of the prompt's rewards, shrunk to the pool's (1 if no prompt has two rollouts)."""
    if model == "empirical":
        common = _common_variance(pool, unknown=1.0)
        rollouts = np.maximum(prompts.trials - 1, 0) + POOL_ROLLOUTS
        return (prompts.reward_squares + POOL_ROLLOUTS * common) / rollouts
    a, b = beta_prior(pool.successes, pool.trials)
    return bernoulli(a + prompts.successes, b + prompts.trials - prompts.successes)


def success_rate(prompts: Statistics, pool: Statistics) -> np.ndarray:
    """Posterior mean of p of each of `prompts`, float64 [N] in (0, 1); the prior is fitted to the pool."""
    a, b = beta_prior(pool.successes, pool.trials)
    return (a + prompts.successes) / (a + b + prompts.trials)


def _sum(values: np.ndarray) -> float:
    """An exact sum, so that the order does not matter. Over a list, since fsum is slow on numpy's numbers."""
    return math.fsum(values.tolist())


def measured_energies(prompts: Statistics, pool: Statistics) -> tuple[np.ndarray, np.ndarray]:
    """Mean energies of right and of wrong rollouts, float64 [N] each, not shrunk: the pool's where a prompt has none,
    and 1 where the pool has none."""
    means = []
    for kind in ("energy_right", "energy_wrong"):
        trials, energy = getattr(pool, f"{kind}_trials").sum(), getattr(pool, kind).sum()
        mean = np.full(len(prompts), energy / trials if trials > 0 else 1.0)
        measured = getattr(prompts, f"{kind}_trials")
        means.append(np.divide(getattr(prompts, kind), measured, out=mean, where=measured > 0))
    return means[0], means[1]


# -- baselines: a prompt's expected reward, the part that is known before its rollouts are sampled --------------------
MEAN_RANGE = (0.02, 0.98)  # of the pool's success rate: no prompt counts as hopeless or solved before it is tried
STRENGTH_MOST = 16.0  # rollouts: the policy changes, so more rollouts do not make the mean more reliable
POOL_STRENGTH_RANGE = (0.25, 16.0)  # rollouts: bounds of a fitted prior strength


@dataclass(frozen=True)
class Baseline:
    """The baselines of N prompts, or of the prompts of N rollouts, known before the rollouts are sampled."""

    mean: np.ndarray  # float64 [N]: the expected reward
    strength: np.ndarray  # float64 [N]: how many rollouts `mean` counts as; 0 for nothing known
    score_ratio: float = 1.0  # energy of wrong over right rollouts (`EnergyLine.score_ratio`)
    variance: float | None = None  # of a rollout's reward within its prompt; None: rewards are 0 or 1

    def of(self, indices: np.ndarray) -> Baseline:
        return replace(self, mean=self.mean[indices], strength=self.strength[indices])

    def with_rollouts(self, rewards: np.ndarray, counts: np.ndarray) -> Baseline:
        """Returns the baselines with further rollouts of each prompt added: sum of rewards, float64 [N], and number of
        rollouts, int64 [N]."""
        strength = self.strength + counts
        total = self.mean * self.strength + rewards
        return replace(self, mean=np.divide(total, strength, out=0 * total, where=strength > 0), strength=strength)

    @classmethod
    def join(cls, baselines: Sequence[Baseline]) -> Baseline:
        """Concatenates baselines; score ratio and variance are those of the first."""
        mean, strength = (np.concatenate([getattr(b, name) for b in baselines]) for name in ("mean", "strength"))
        return replace(baselines[0], mean=mean, strength=strength)


def shrunk(prompts: Statistics, pool: Statistics, pool_strength: float, variance: float | None) -> Baseline:
    """Returns each prompt's mean reward so far, shrunk to the mean of the pool, which counts as `pool_strength`
    rollouts, or for rewards other than 0 and 1 (`variance` not None) as many as the ratio of their variances within and
    between prompts. Without any history mean and strength are 0."""
    if not len(pool):
        return Baseline(np.zeros(len(prompts)), np.zeros(len(prompts)), variance=variance)
    trials, means = pool.trials, pool.reward_mean
    fit = (variance, POOL_STRENGTH_RANGE, POOL_STRENGTH_RANGE[1])
    c = _fitted(means, trials, *fit)[1] if variance else pool_strength  # 0: not known yet
    weight = trials / (trials + c)
    centre = float((weight * means).sum() / weight.sum())
    if variance is None:
        centre = min(max(centre, MEAN_RANGE[0]), MEAN_RANGE[1])
    mean = (c * centre + prompts.trials * prompts.reward_mean) / (c + prompts.trials)
    return Baseline(mean, np.minimum(c + prompts.trials, STRENGTH_MOST), variance=variance)


def variance_within(pool: Statistics) -> float | None:
    """The mean variance of the rewards of a prompt's rollouts. 0 if no prompt had two rollouts; None if all rewards so
    far were 0 or 1."""
    trials, mean = pool.trials, pool.reward_mean
    squares = trials * mean * (1 - mean)  # of rewards that are 0 or 1
    bernoulli = np.allclose(pool.successes, trials * mean) and np.allclose(pool.reward_squares, squares, atol=1e-9)
    return None if bernoulli else _common_variance(pool, unknown=0.0)


def _common_variance(pool: Statistics, unknown: float) -> float:
    """Returns the weighted mean over prompts of the sample variance of a prompt's rewards; `unknown` if no prompt had
    two rollouts. With f = rollouts - 1, a prompt's weight is f / (f + POOL_ROLLOUTS). Weights of f would favour the
    prompts that the allocator does."""
    free = np.maximum(pool.trials - 1, 0)
    known = _sum(free / (free + POOL_ROLLOUTS))
    return _sum(pool.reward_squares / (free + POOL_ROLLOUTS)) / known if known > 0 else unknown
