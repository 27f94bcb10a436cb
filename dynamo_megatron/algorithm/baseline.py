"""A prompt's expected reward from earlier steps: the part of a baseline that is known before its rollouts are sampled
(`history_advantages`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dynamo_megatron.algorithm.history import Statistics
from dynamo_megatron.algorithm.success import by_stratum

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
    """Returns each prompt's mean reward so far, shrunk to the mean of the pool, or of its stratum (`prior_by`), which
    counts as `pool_strength` rollouts, or for rewards other than 0 and 1 (`variance` not None) as many as the ratio of
    their variances within and between prompts. Without any history mean and strength are 0."""

    def estimate(prompts: Statistics, pool: Statistics) -> np.ndarray:
        trials, means = pool.trials, pool.reward_mean
        c = _fitted_strength(trials, means, variance) if variance else pool_strength  # 0: not known yet
        weight = trials / (trials + c)
        centre = float((weight * means).sum() / weight.sum())
        if variance is None:
            centre = min(max(centre, MEAN_RANGE[0]), MEAN_RANGE[1])
        mean = (c * centre + prompts.trials * prompts.reward_mean) / (c + prompts.trials)
        return np.stack([mean, np.minimum(c + prompts.trials, STRENGTH_MOST)])

    mean, strength = by_stratum(estimate, prompts, pool) if len(pool) else np.zeros((2, len(prompts)))
    return Baseline(mean, strength, variance=variance)


def variance_within(pool: Statistics) -> float | None:
    """Pooled variance of the rewards of a prompt's rollouts. 0 if no prompt had two rollouts; None if all rewards so
    far were 0 or 1."""
    trials, mean = pool.trials, pool.reward_mean
    bernoulli = np.allclose(pool.successes, trials * mean) and np.allclose(
        pool.reward_squares, trials * mean * (1 - mean), atol=1e-9
    )
    if bernoulli:
        return None
    freedom = np.maximum(trials - 1, 0).sum()
    return float(pool.reward_squares.sum() / freedom) if freedom > 0 else 0.0


def _fitted_strength(trials: np.ndarray, means: np.ndarray, within: float) -> float:
    """Returns variance within / variance between prompts, by the method of moments: the expectation of
    sum t (mean - centre)^2 over m prompts is within (m - 1) + between (sum t - sum t^2 / sum t)."""
    total = trials.sum()
    centre = (trials * means).sum() / total
    excess = total - (trials**2).sum() / total
    low, high = POOL_STRENGTH_RANGE
    between = ((trials * (means - centre) ** 2).sum() - within * (len(trials) - 1)) / excess if excess > 1e-9 else 0.0
    return float(min(max(within / between, low), high)) if between > 0 else high
