"""What a step should have computed, in numpy and float64: advantages, weights, loss and its slope by each logprob.

Written from the papers, without the trainer's algorithm, so that a mistake there is not repeated. The step has
one update, so the old policy is the policy: every ratio is 1, and no clip has an effect.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dynamo_megatron.config import Config, ModulationConfig
from dynamo_megatron.types import RolloutBatch

if TYPE_CHECKING:
    from dynamo_megatron.algorithm.success import Baseline  # plain data


class Statistics(NamedTuple):
    """Of the R response tokens, float64 [R], nats."""

    logprobs: np.ndarray
    entropy: np.ndarray
    expected_pi_lambda: np.ndarray  # sum_v p_v^2 (log p_v + H)


class Loss(NamedTuple):
    """Of each response token, float64 [R]; the sums are the step's."""

    loss: np.ndarray
    slope: np.ndarray  # d loss / d logprob
    entropy_slope: np.ndarray  # d loss / d entropy


def not_covered(config: Config) -> str | None:
    """The first key of the configuration with which the reference cannot compute a step; None: it can."""
    a = config.algorithm
    keys = {
        "model.lora": config.model.lora is not None,
        "algorithm.advantage.kind": a.advantage.kind not in ("grpo", "dr_grpo", "rloo", "reinforce", "history"),
        "algorithm.advantage.diversity": a.advantage.diversity > 0,
        "algorithm.loss.kind": a.loss.function is not None,
        "algorithm.loss.mini_batches": a.loss.mini_batches > 1,
        "algorithm.loss.old": a.loss.old == "engine",
        "algorithm.loss.entropy_top_ratio, clip_cov or kl_cov": a.loss.selects,
        "algorithm.kl.coef": a.kl.coef > 0,
        "algorithm.modulation.scope": a.modulation is not None and a.modulation.scope == "micro_batch",
        "algorithm.modulation.expectation": a.modulation is not None and a.modulation.expectation != "exact",
        "algorithm.rollout_correction": a.rollout_correction is not None,
        "algorithm.sequential": a.sequential is not None,
        # Later rounds' baselines have the rewards of the step's earlier rounds, which no checkpoint has.
        "algorithm.dynamic_sampling": a.needs_baseline and a.dynamic_sampling is not None,
        "algorithm.teacher": a.teacher is not None,
        "reward.prime": config.reward.implicit,
        "rollout.max_staleness": a.needs_baseline and config.rollout.max_staleness > 0,
    }
    return next((key for key, used in keys.items() if used), None)


def learning_rate(config: Config, step: int) -> float:
    """Linear warm-up to `optimizer.lr`, then constant, or down to 0 after the last step linearly or as half a cosine.
    Steps in which the critic alone learns do not count."""
    o, alone = config.optimizer, config.critic.warmup_steps
    step, last = max(1, step - alone), config.trainer.steps - alone
    if step <= o.warmup_steps:
        return o.lr * step / o.warmup_steps
    left = 1 - (step - 1 - o.warmup_steps) / max(1, last - o.warmup_steps)
    return o.lr * {"constant": 1.0, "linear": left, "cosine": math.sin(left * math.pi / 2) ** 2}[o.schedule]


def groups_of(group_ids: Iterable[str]) -> list[list[int]]:
    """The rollouts of each group."""
    members = defaultdict(list)
    for s, group in enumerate(group_ids):
        members[group].append(s)
    return list(members.values())


def advantages(rollouts: RolloutBatch, config: Config, history: Baseline | None) -> np.ndarray:
    """float64 [S]"""
    a, longest, found = config.algorithm.advantage, config.rollout.max_new_tokens, np.zeros(len(rollouts.rewards))
    rewards = rollouts.rewards.astype(np.float64)
    if a.overlong_buffer is not None:  # DAPO, Eq. 13
        over = (rollouts.response_lengths - longest) / (a.overlong_buffer * longest) + 1
        rewards = rewards - a.overlong_penalty * np.clip(over, 0, 1)
    for members in groups_of(rollouts.group_ids):
        r, n = rewards[members], len(members)
        if history is not None:
            found[members] = [_beyond_history(r, j, s, history) for j, s in enumerate(members)]
        elif a.kind == "reinforce":
            found[members] = 2 * r - 1
        elif n == 1:
            found[members] = r / (1 + a.eps * (a.kind == "grpo")) if a.singleton == "raw" else 0
        elif np.ptp(r) > 0:
            by = {"grpo": r.std(ddof=1) + a.eps, "dr_grpo": 1, "rloo": (n - 1) / n}
            found[members] = (r - r.mean()) / by[a.kind]
    found = np.where(found > 0, a.positive_weight * found, found)
    if a.normalise == "batch":
        found = (found - found.mean()) / (found.std(ddof=int(len(found) > 1)) + 1e-8)
    return found


def _beyond_history(rewards: np.ndarray, j: int, s: int, history: Baseline) -> float:
    """Rollout s, the group's j-th: its reward less the mean of the group's others and of `strength` rollouts of the
    history; or less the baseline of least variance, where a rollout's energy depends on its reward."""
    r = rewards if history.score_ratio == 1 else np.clip(rewards, 0, 1)
    if (count := history.strength[s] + len(r) - 1) == 0:
        return float(rewards[j] - r[j])
    p = (history.mean[s] * history.strength[s] + np.delete(r, j).sum()) / count
    if history.score_ratio != 1:
        p, k = min(max(p, 0.0), 1.0), 1 / history.score_ratio - 1
        most = math.inf if history.variance is None else history.variance
        p += k * min(p * (1 - p), most) / (1 + k * p)
    return float(rewards[j] - p)


def weights(rollouts: RolloutBatch, config: Config) -> np.ndarray:
    """float64 [S]: of each token of a rollout in the loss."""
    lengths, longest = rollouts.response_lengths.astype(np.float64), config.rollout.max_new_tokens
    total, found, groups = len(lengths), np.zeros(len(lengths)), groups_of(rollouts.group_ids)
    for members in groups:
        own, n = lengths[members], len(members)
        found[members] = {
            "token_mean": lengths.sum(),
            "sequence_mean": total * own,
            "sequence_sum": total,
            "constant_length": total * longest,
            "prompt_mean": len(groups) * n * longest,
            "prompt_token_mean": len(groups) * own.sum(),
        }[config.algorithm.loss.aggregation]
    return np.where(lengths > 0, 1 / np.maximum(found, 1), 0)


def token_losses(rollouts: RolloutBatch, config: Config, seen: Statistics, history: Baseline | None = None) -> Loss:
    """PPO's loss, or CISPO's, of modulated advantages, less an entropy bonus. `history`: what is known of each
    rollout's prompt, from the run's state (advantage.kind: history)."""
    algorithm, lengths = config.algorithm, rollouts.response_lengths
    a = np.repeat(advantages(rollouts, config, history), lengths)
    w = np.repeat(weights(rollouts, config), lengths)
    if (shaping := algorithm.advantage.entropy_shaping) is not None:
        a = a + np.minimum(shaping.alpha * seen.entropy, np.abs(a) / shaping.kappa)
    slope, bonus = -w * a * _modulation(a, algorithm.modulation, seen), algorithm.loss.entropy_coef * w
    policy = slope * seen.logprobs if algorithm.loss.kind == "cispo" else slope
    return Loss(policy - bonus * seen.entropy, slope, -bonus)


def _modulation(a: np.ndarray, m: ModulationConfig | None, seen: Statistics) -> np.ndarray:
    """DynaMO's factor of each token's advantage, float64 [R]."""
    h = seen.entropy
    if m is None or len(h) == 0:
        return np.ones_like(a)
    change = np.abs(a * (np.exp(seen.logprobs) * (seen.logprobs + h) - seen.expected_pi_lambda))
    share = np.clip(change / (change.max() + 1e-8), 0, 1)
    stab = m.lambda_min + (1 - m.lambda_min) / (1 + np.exp(m.gamma * (share - m.tau)))
    return stab * np.where(a > 0, 1 + m.alpha * (h.max() - h) / (h.max() - h.min() + 1e-8), 1)
