"""What a step should have computed, in numpy and float64: advantages, weights, loss and its derivative by each logprob.

Written from the papers' formulas, without the trainer's algorithm, so that a mistake there is not repeated.
Groups are made one by one, from their ids. The policy is that of the beginning of the step: the ratio of every token to
it is 1.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dynamo_megatron.config import AlgorithmConfig, Config
from dynamo_megatron.types import RolloutBatch


class Statistics(NamedTuple):
    """Of the R response tokens, under the weights of the beginning of the step; float64 [R], nats."""

    logprobs: np.ndarray
    entropy: np.ndarray
    expected_pi_lambda: np.ndarray  # sum_v p_v^2 (log p_v + H)
    reference: np.ndarray | None = None  # logprobs of the policy that algorithm.kl compares with; None: no such term


class Baselines(NamedTuple):
    """What the history says of each rollout's prompt (advantage.kind: history), fixed before the rollouts; float64 [S].
    Read from the run's state, not computed again."""

    mean: np.ndarray
    strength: np.ndarray  # rollouts
    ratio: float  # energy of wrong over right rollouts
    variance: float | None  # most that rewards vary


class Loss(NamedTuple):
    """Of each response token, float64 [R], with its weight; their sums are the step's."""

    loss: np.ndarray
    slope: np.ndarray  # d loss / d logprob
    entropy_slope: np.ndarray  # d loss / d entropy
    advantages: np.ndarray  # before the modulation


def not_covered(config: Config) -> str | None:
    """The first key of the configuration with which the reference cannot compute a step; None: it can."""
    a = config.algorithm
    loss, kind, modulation = a.loss, a.advantage.kind, a.modulation
    keys = {
        f"algorithm.advantage.kind: {kind}": kind not in ("grpo", "dr_grpo", "rloo", "reinforce", "history"),
        "algorithm.advantage.entropy_shaping": isinstance(a.advantage.entropy_shaping, str),
        f"algorithm.loss.kind: {loss.kind}": loss.function is not None,
        "algorithm.loss.entropy_top_ratio": loss.entropy_top_ratio is not None,
        "algorithm.loss.clip_cov": loss.clip_cov is not None,
        "algorithm.loss.kl_cov": loss.kl_cov is not None,
        "algorithm.loss.mini_batches": loss.mini_batches > 1,  # the checkpoints have the sum of several updates
        "algorithm.modulation.scope: micro_batch": modulation is not None and modulation.scope == "micro_batch",
        "algorithm.sequential": a.sequential is not None,
        "algorithm.teacher": a.teacher is not None,
        "data.selection.weights": config.data.selection.weights,
        "reward.prime": bool(config.reward.implicit),
        "rollout.max_staleness with history": config.rollout.max_staleness > 0 and kind == "history",
        "model.lora": config.model.lora is not None,
    }
    return next((key for key, used in keys.items() if used), None)


def learning_rate(config: Config, step: int) -> float:
    """Linear warm-up to `optimizer.lr`, then constant, or down to 0 at the last step linearly or as half a cosine."""
    o, last = config.optimizer, config.trainer.steps
    if step <= o.warmup_steps:
        return o.lr * step / o.warmup_steps
    left = (last - step) / max(1, last - o.warmup_steps)
    return o.lr * {"constant": 1.0, "linear": left, "cosine": math.sin(left * math.pi / 2) ** 2}[o.schedule]


def groups_of(rollouts: RolloutBatch) -> list[list[int]]:
    """The rollouts of each group, by group_id."""
    members = defaultdict(list)
    for s, group in enumerate(rollouts.group_ids):
        members[group].append(s)
    return list(members.values())


def differing(rewards: Sequence[float], group_ids: Sequence[str]) -> list[int]:
    """The rollouts of groups with different rewards, which dynamic sampling trains on; all where there are none."""
    values = defaultdict(set)
    for group, reward in zip(group_ids, rewards, strict=True):
        values[group].add(reward)
    return [s for s, group in enumerate(group_ids) if len(values[group]) > 1] or list(range(len(group_ids)))


def advantages(rollouts: RolloutBatch, config: Config, baselines: Baselines | None) -> np.ndarray:
    """float64 [S]."""
    a, found = config.algorithm.advantage, np.zeros(len(rollouts.rewards))
    rewards, lengths = rollouts.rewards.astype(np.float64), rollouts.response_lengths
    if a.overlong_buffer is not None:  # DAPO, Eq. 13
        buffer = a.overlong_buffer * config.rollout.max_new_tokens
        over = (lengths - config.rollout.max_new_tokens + buffer) / buffer
        rewards = rewards - a.overlong_penalty * np.clip(over, 0, 1)
    for members in groups_of(rollouts):
        r, n = rewards[members], len(members)
        if a.kind == "history":
            assert baselines is not None
            found[members] = [_beyond_history(r, j, s, baselines) for j, s in enumerate(members)]
        elif a.kind == "reinforce":
            found[members] = 2 * r - 1
        elif n == 1:
            raw = r / (1 + a.eps) if a.kind == "grpo" else r
            found[members] = raw if a.singleton == "raw" else 0.0
        elif np.ptp(r) > 0:
            centred = r - r.mean()
            found[members] = {
                "grpo": centred / (centred.std() * math.sqrt(n / (n - 1)) + a.eps),
                "dr_grpo": centred,
                "rloo": centred * n / (n - 1),
            }[a.kind]
    found = np.where(found > 0, a.positive_weight * found, found)
    if a.normalise == "batch":
        centred = found - found.mean()
        found = centred / (math.sqrt((centred**2).sum() / max(1, len(found) - 1)) + 1e-8)
    return found


def _beyond_history(rewards: np.ndarray, j: int, s: int, history: Baselines) -> float:
    """Rollout s, the group's j-th: its reward less the mean of the group's others and of `strength` rollouts of the
    history; or less the baseline of least variance, where the energy of a rollout depends on its reward."""
    r = rewards if history.ratio == 1 else np.clip(rewards, 0, 1)
    count = history.strength[s] + len(r) - 1
    if count == 0:
        return float(rewards[j] - r[j])
    p = (history.mean[s] * history.strength[s] + np.delete(r, j).sum()) / count
    if history.ratio != 1:
        p, k = min(max(p, 0.0), 1.0), 1 / history.ratio - 1
        spread = p * (1 - p) if history.variance is None else min(p * (1 - p), history.variance)
        p += k * spread / (1 + k * p)
    return float(rewards[j] - p)


def divisors(rollouts: RolloutBatch, config: Config) -> np.ndarray:
    """float64 [S]: what the loss of each token of a rollout is divided by; infinity for a rollout without tokens."""
    lengths, found = rollouts.response_lengths.astype(np.float64), np.zeros(len(rollouts.rewards))
    groups, longest = groups_of(rollouts), config.rollout.max_new_tokens
    for members in groups:
        own = lengths[members]
        found[members] = {
            "token_mean": lengths.sum() + 0 * own,
            "sequence_mean": len(lengths) * own,
            "sequence_sum": len(lengths) + 0 * own,
            "constant_length": len(lengths) * longest + 0 * own,
            "prompt_mean": len(groups) * len(members) * longest + 0 * own,
            "prompt_token_mean": len(groups) * own.sum() + 0 * own,
        }[config.algorithm.loss.aggregation]
    return np.where(lengths > 0, np.maximum(found, 1), np.inf)


def token_losses(rollouts: RolloutBatch, config: Config, seen: Statistics, baselines: Baselines | None = None) -> Loss:
    """The loss of each response token. Nothing is trained yet, so the old policy is the policy (`loss.old: policy`), or
    the engine's."""
    algorithm, lengths = config.algorithm, rollouts.response_lengths
    engine = rollouts.engine_logprobs.astype(np.float64)
    a = np.repeat(advantages(rollouts, config, baselines), lengths)
    w = np.repeat(1 / divisors(rollouts, config), lengths)
    if (shaping := algorithm.advantage.entropy_shaping) is not None:
        a = a + np.minimum(shaping.alpha * seen.entropy, np.abs(a) / shaping.kappa)
    if (correction := algorithm.rollout_correction) is not None:
        apart = seen.logprobs - engine
        ratio = np.exp(np.minimum(_of_responses(apart, lengths) if correction.level == "sequence" else apart, 20))
        inside = (correction.low <= ratio) & (ratio <= correction.high)
        w = w * (np.clip(ratio, correction.low, correction.high) if correction.kind == "truncate" else ratio * inside)
    shaped = a * _modulation(a, lengths, algorithm, seen)
    drift = seen.logprobs - engine if algorithm.loss.old == "engine" else np.zeros_like(engine)
    if algorithm.loss.ratio != "token":
        drift = _of_responses(drift, lengths, mean=algorithm.loss.ratio == "sequence_mean")
    loss, slope = _surrogate(shaped, drift, seen.logprobs, algorithm)
    if (kl := algorithm.kl).coef:
        assert seen.reference is not None
        d = seen.logprobs - seen.reference
        estimate, derivative = {
            "k1": (d, np.ones_like(d)),
            "abs": (np.abs(d), np.sign(d)),
            "k2": (d**2 / 2, d),
            "k3": (np.exp(-d) + d - 1, 1 - np.exp(-d)),
        }[kl.kind]
        if kl.kind == "k3":  # bounded as published
            estimate, derivative = np.minimum(estimate, 10), np.where(estimate > 10, 0, derivative)
        loss, slope = loss + kl.coef * estimate, slope + kl.coef * derivative
    loss = loss - algorithm.loss.entropy_coef * seen.entropy
    return Loss(w * loss, w * slope, -algorithm.loss.entropy_coef * w, a)


def _surrogate(
    a: np.ndarray, drift: np.ndarray, logprobs: np.ndarray, algorithm: AlgorithmConfig
) -> tuple[np.ndarray, np.ndarray]:
    """(the policy loss of each token, its derivative by the token's logprob); PPO's with dual clip, or CISPO's."""
    options, ratio = algorithm.loss, np.exp(np.clip(drift, -20, 20))
    held = np.clip(ratio, 1 - options.clip_ratio_low, 1 + options.clip_ratio_high)
    if options.kind == "cispo":
        return -a * held * logprobs, -a * held
    loss, slope = np.maximum(-a * ratio, -a * held), np.where((-a * held > -a * ratio) | (drift > 20), 0, -a * ratio)
    if options.clip_ratio_c is not None:
        dual = (a < 0) & (loss > -a * options.clip_ratio_c)
        loss, slope = np.where(dual, -a * options.clip_ratio_c, loss), np.where(dual, 0, slope)
    return loss, slope


def _modulation(a: np.ndarray, lengths: np.ndarray, algorithm: AlgorithmConfig, seen: Statistics) -> np.ndarray:
    """DynaMO's factor of each advantage, float64 [R]."""
    m, h = algorithm.modulation, seen.entropy
    if m is None or len(h) == 0:
        return np.ones_like(a)
    pi_lambda, expected = np.exp(seen.logprobs) * (seen.logprobs + h), seen.expected_pi_lambda
    if m.expectation == "sequence_mean":
        expected = _of_responses(pi_lambda, lengths, mean=True)
    change = np.abs(a * (pi_lambda - expected))
    most = change.max()
    if m.stabiliser == "quantile":
        moved = np.sort(change[change > 0])
        most = moved[max(1, math.ceil(m.quantile * len(moved) - 1e-9)) - 1] if len(moved) else 0.0
    share = np.clip(change / (most + 1e-8), 0, 1)
    stab = m.lambda_min + (1 - m.lambda_min) / (1 + np.exp(m.gamma * (share - m.tau)))
    return stab * np.where(a > 0, 1 + m.alpha * (h.max() - h) / (h.max() - h.min() + 1e-8), 1)


def _of_responses(values: np.ndarray, lengths: np.ndarray, mean: bool = False) -> np.ndarray:
    """The sum, or the mean, over each token's response, [R]."""
    parts = np.split(values, np.cumsum(lengths)[:-1])
    return np.concatenate([np.full(len(p), p.mean() if mean and len(p) else p.sum()) for p in parts] or [values])
