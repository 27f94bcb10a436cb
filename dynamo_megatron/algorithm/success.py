"""Estimates of a prompt's success rate and of the variance of its gradient, from its rollouts so far."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

from dynamo_megatron.algorithm.arrays import Array, like, to_numpy
from dynamo_megatron.algorithm.energy_variance import energy_variance
from dynamo_megatron.algorithm.history import NO_STRATUM, Statistics

# Prior strength a + b in rollouts: the bounds of a fit, and the value if nothing can be fitted.
STRENGTH_RANGE = (0.1, 1000.0)
STRENGTH_UNKNOWN = 1.0
# The weight, in rollouts, of the pool's variance and mean length in those of every prompt.
POOL_ROLLOUTS = 4.0
# A stratum with at least this many prompts with history has a prior of its own. Measured on eight strata, 8 rollouts
# per prompt: compared with the pool's prior, the variance changes by -3 % with 8 prompts and -5 % with 16 where strata
# matter, and by +3 % and +1 % where they do not.
STRATUM_LEAST = 16


def success_variance(successes: Array, trials: Array) -> Array:
    """Unbiased estimate of p(1 - p) from k successes in G trials: k(G - k) / (G(G - 1)), float64 [N], NaN where G < 2.

    Raises ValueError naming the entry where 0 <= k <= G does not hold.
    """
    k, g = to_numpy(successes, "successes").astype(np.float64), to_numpy(trials, "trials").astype(np.float64)
    if k.shape != g.shape:
        raise ValueError(f"successes: {len(k)} entries for {len(g)} trials")
    if (bad := np.flatnonzero(~(np.isfinite(g) & (k >= 0) & (k <= g)))).size:
        raise ValueError(f"successes: entry {bad[0]} is {k[bad[0]]} of {g[bad[0]]} trials")
    pairs = np.where(g >= 2, g * (g - 1), np.nan)
    return like(k * (g - k) / pairs, successes)


def beta_prior(successes: np.ndarray, trials: np.ndarray) -> tuple[float, float]:
    """(a, b) of a Beta prior fitted to prompts with `trials` > 0 by the moments of the beta-binomial (empirical Bayes).

    The mean is the pooled success rate, kept away from 0 and 1 by half a rollout each. The strength a + b = 1 / rho - 1
    follows from the spread of the prompts' rates: the expectation of S = sum G (k/G - mean)^2 over m prompts is
    mean (1 - mean) ((1 - rho) (m - 1) + rho (sum G - sum G^2 / sum G)). Sums are exact, so the order of the prompts
    does not matter.
    """
    total, won = _sum(trials), _sum(successes)
    mean = (won + 0.5) / (total + 1)
    strength = STRENGTH_UNKNOWN
    within = len(trials) - 1
    excess = total - _sum(trials**2) / total - within if total else 0.0
    if excess > 1e-9:
        spread = _sum(trials * (successes / trials - won / total) ** 2)
        rho = (spread / (mean * (1 - mean)) - within) / excess
        strength = min(max(1 / rho - 1, STRENGTH_RANGE[0]), STRENGTH_RANGE[1]) if rho > 0 else STRENGTH_RANGE[1]
    return mean * strength, (1 - mean) * strength


def bernoulli(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """E[p(1 - p)] under Beta(a, b)."""
    return a * b / ((a + b) * (a + b + 1))


def surprise(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """p(1 - p) with a rollout's squared score approximated by its surprise + 1/2: a rare answer has a large gradient.

    E[p (1-p)^2] (1/2 - log p) + E[p^2 (1-p)] (1/2 - log(1-p)) under Beta(a, b), the logarithms at the mean of p.
    """
    s = a + b
    right = a * b * (b + 1) / (s * (s + 1) * (s + 2))
    wrong = a * b * (a + 1) / (s * (s + 1) * (s + 2))
    return right * (0.5 - np.log(a / s)) + wrong * (0.5 - np.log(b / s))


def empirical(squares: np.ndarray, trials: np.ndarray, pool_squares: np.ndarray, pool_trials: np.ndarray) -> np.ndarray:
    """Sample variance of each prompt's rewards, shrunk to the pool's.

    `squares` are the sums of squared deviations from the prompt's mean, `pool_*` those of every prompt with history.
    If no prompt of the pool has two rollouts, the pool's variance is set to 1.
    """
    freedom = _sum(np.maximum(pool_trials - 1, 0))
    pool = _sum(pool_squares) / freedom if freedom > 0 else 1.0
    return (squares + POOL_ROLLOUTS * pool) / (np.maximum(trials - 1, 0) + POOL_ROLLOUTS)


def expected_variance(model: str, prompts: Statistics, pool: Statistics) -> np.ndarray:
    """The expected variance of a rollout of each of `prompts`, float64 [N], by `model` (bernoulli, surprise, energy,
    empirical).

    The prior is from `pool`: from the prompts of the same stratum, or from all prompts if a prompt has no stratum or
    one with fewer than STRATUM_LEAST prompts in the pool.
    """
    return by_stratum(functools.partial(_variance, model), prompts, pool)


def expected_tokens(prompts: Statistics, pool: Statistics) -> np.ndarray:
    """Expected response tokens of a rollout of each of `prompts`, float64 [N] above 0: the prompt's mean length shrunk
    to the pool's; 1 for all if no length is known."""
    trials, tokens = pool.token_trials.sum(), pool.tokens.sum()
    mean = tokens / trials if tokens > 0 and trials > 0 else 1.0
    return (prompts.tokens + POOL_ROLLOUTS * mean) / (prompts.token_trials + POOL_ROLLOUTS)


def success_rate(prompts: Statistics, pool: Statistics) -> np.ndarray:
    """Posterior mean of p of each of `prompts`, float64 [N] in (0, 1); the prior is as in `expected_variance`."""
    return by_stratum(_rate, prompts, pool)


def _rate(prompts: Statistics, pool: Statistics) -> np.ndarray:
    a, b = beta_prior(pool.successes, pool.trials)
    return (a + prompts.successes) / (a + b + prompts.trials)


def _variance(model: str, prompts: Statistics, pool: Statistics) -> np.ndarray:
    if model == "empirical":
        return empirical(prompts.reward_squares, prompts.trials, pool.reward_squares, pool.trials)
    prior = beta_prior(pool.successes, pool.trials)
    if model == "energy":
        return energy_variance(prompts, pool, prior)
    a, b = prior[0] + prompts.successes, prior[1] + prompts.trials - prompts.successes
    return {"bernoulli": bernoulli, "surprise": surprise}[model](a, b)


def by_stratum(
    estimate: Callable[[Statistics, Statistics], np.ndarray], prompts: Statistics, pool: Statistics
) -> np.ndarray:
    """`estimate(prompts, pool)`, float64 [..., N]; of the prompts of a stratum with enough of them in `pool`, from
    those of the pool alone."""
    result = estimate(prompts, pool)
    peers_of = _members(pool.strata)
    for stratum, own in _members(prompts.strata).items():
        peers = peers_of.get(stratum)
        if peers is not None and len(peers) >= STRATUM_LEAST:
            result[..., own] = estimate(prompts.take(own), pool.take(peers))
    return result


def _members(strata: np.ndarray) -> dict[int, np.ndarray]:
    """stratum -> the indices of its prompts, without NO_STRATUM."""
    if (strata == NO_STRATUM).all():
        return {}
    order = np.argsort(strata, kind="stable")
    numbers, starts = np.unique(strata[order], return_index=True)
    members = zip(numbers.tolist(), np.split(order, starts[1:]), strict=True)
    return {number: indices for number, indices in members if number != NO_STRATUM}


def _sum(values: np.ndarray) -> float:
    """An exact sum, so that the order does not matter. Over a list, since fsum is slow on numpy's numbers."""
    return math.fsum(values.tolist())
