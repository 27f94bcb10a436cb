"""Estimates the gradient's variance from the rollouts' energies, without backward passes (arXiv 2602.07078).

The metrics have verl's names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dynamo_megatron.algorithm.arrays import group_index
from dynamo_megatron.algorithm.energy import rollout_energies, token_baselines, token_energies

if TYPE_CHECKING:
    from dynamo_megatron.config.method import AdvantageConfig
    from dynamo_megatron.policy.batch import TrainBatch
    from dynamo_megatron.types import TokenStats


def variance_proxy(batch: TrainBatch, stats: TokenStats, grad_norm: float, config: AdvantageConfig) -> dict[str, float]:
    """Metrics of a step. W is a rollout's energy, A its advantage (with kind otb, and with process rewards, the mean
    over its tokens), N the number of rollouts.

    Signal strength is the squared gradient norm of the update, whose scale depends on the aggregation. Total power is
    the mean of A^2 W. Pure noise is total power less signal strength, over N - 1, and at least 0.
    """
    rollouts, advantages = batch.rollouts, batch.advantages
    logprobs, collision, lengths = stats.logprobs.numpy(), stats.collision.numpy(), rollouts.response_lengths
    energies = rollout_energies(logprobs, collision, lengths)
    if config.kind == "otb":
        group, _ = group_index(rollouts.group_ids, len(lengths))
        of_tokens = token_baselines(advantages, group, token_energies(logprobs, collision), lengths, config.singleton)
        owner = np.repeat(np.arange(len(lengths)), lengths)
        advantages = advantages - np.bincount(owner, of_tokens, minlength=len(lengths)) / np.maximum(lengths, 1)
    advantages = advantages + batch.mean_process
    signal, power = grad_norm**2, float(np.mean(advantages**2 * energies)) if len(energies) else 0.0
    return {
        "variance_proxy/proxy1_signal_strength": signal,
        "variance_proxy/proxy2_total_power": power,
        "variance_proxy/proxy3_pure_noise": max(0.0, (power - signal) / max(1, len(energies) - 1)),
        "variance_proxy/expected_a_squared": float(np.mean(advantages**2)) if len(energies) else 0.0,
        "variance_proxy/expected_w": float(np.mean(energies)) if len(energies) else 0.0,
    }
