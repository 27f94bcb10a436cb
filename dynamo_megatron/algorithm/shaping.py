"""From rollouts to tokens: what a method does to the advantages and weights of a mini-batch, in order.

Everything is over the whole mini-batch and from the log-prob pass, where the ratio is 1, so every rank computes the
same. DynaMO's modulation itself is in the policy head, within the ranges found here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from dynamo_megatron.algorithm.advantages import entropy_advantages
from dynamo_megatron.algorithm.arrays import group_index
from dynamo_megatron.algorithm.energy import token_baselines, token_energies
from dynamo_megatron.algorithm.modulation import ModulationRanges, entropy_change, modulation_ranges
from dynamo_megatron.algorithm.rollout_correction import correction_weights, importance_ratios
from dynamo_megatron.algorithm.selection import clip_cov, covariance, kl_cov, random_keys, top_entropy
from dynamo_megatron.config import AlgorithmConfig
from dynamo_megatron.config.method import AdvantageConfig
from dynamo_megatron.types import RolloutBatch, TokenStats


class Shaped(NamedTuple):
    """Per response token of the step, [R], 0 outside the mini-batch; the same on every rank."""

    advantages: torch.Tensor  # float32
    weights: torch.Tensor  # float32
    old_kl_coef: torch.Tensor | None  # float32: of |logprob - old logprob|; None: no such term
    selected: torch.Tensor  # bool: singled out by entropy_top_ratio (trained), clip_cov or kl_cov
    ranges: ModulationRanges | None  # None: no modulation, or its scope is the micro-batch

    @property
    def trained(self) -> torch.Tensor:
        """bool [R]: the policy loss can have a gradient here, KL and entropy terms aside."""
        moves = self.advantages != 0
        if self.old_kl_coef is not None:
            moves = moves | (self.old_kl_coef != 0)
        return moves & (self.weights != 0)


def shape_tokens(
    rollouts: RolloutBatch,
    members: np.ndarray,
    advantages: np.ndarray,
    weights: np.ndarray,
    stats: TokenStats,
    config: AlgorithmConfig,
    *,
    seed: int,
    process: np.ndarray | None = None,
) -> Shaped:
    """Advantages and weights of the tokens of the rollouts `members` (int64, ascending).

    advantages, weights: float64 [S], one a rollout. stats: float32 [R], of the policy that the step began with. `seed`:
    of clip_cov's random keys. `process`: float64 [R], added to each token's advantage, or None. The tokens that
    entropy_top_ratio selects keep the mini-batch's total weight (arXiv 2506.01939, Eq. 6).
    """
    member = np.zeros(len(advantages), bool)
    member[members] = True
    here = torch.from_numpy(np.flatnonzero(rollouts.per_token(member)))
    lengths = rollouts.response_lengths[members]
    w = torch.from_numpy(rollouts.per_token(weights))[here]
    stats = TokenStats(*(statistic[here] for statistic in stats))
    logprobs, entropy = stats.logprobs, stats.entropy
    selected, old_kl_coef = torch.zeros(len(here), dtype=torch.bool), None

    correct = torch.ones(len(here), dtype=torch.float64)
    if (correction := config.rollout_correction) is not None:
        engine = torch.from_numpy(rollouts.engine_logprobs)[here]
        ratios = importance_ratios(logprobs.double() - engine, torch.from_numpy(lengths), correction.level)
        correct = correction_weights(ratios, correction)
    process = None if process is None else process[here.numpy()]
    a = _token_advantages(rollouts, members, advantages[members], process, stats, config.advantage, correct.numpy())
    if (ratio := config.loss.entropy_top_ratio) is not None and w.any():  # none, as in a critic's first steps
        selected = top_entropy(entropy, ratio)
        w = torch.where(selected, w * (w.sum() / w[selected].sum()), 0.0)
    if config.loss.clip_cov is not None or config.loss.kl_cov is not None:
        spread = covariance(a, logprobs)
        if (clip := config.loss.clip_cov) is not None:
            keys = torch.from_numpy(random_keys([rollouts.rollout_ids[s] for s in members], lengths, seed=seed))
            chosen = clip_cov(spread, keys, ratio=clip.ratio, low=clip.low, high=clip.high)
            a, selected = torch.where(chosen, 0.0, a), selected | chosen
        if (penalty := config.loss.kl_cov) is not None:
            chosen = kl_cov(spread, ratio=penalty.ratio) & bool(a.any())  # no advantage at all: no update to hold back
            old_kl_coef, selected = penalty.coef * chosen, selected | chosen
    w = w * correct

    def over_the_step(values: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(len(rollouts.engine_logprobs), dtype=dtype).index_copy_(0, here, values.to(dtype))

    return Shaped(
        over_the_step(a),
        over_the_step(w),
        None if old_kl_coef is None else over_the_step(old_kl_coef),
        over_the_step(selected, torch.bool),
        _ranges(a.float(), stats, lengths, config),
    )


def _token_advantages(
    rollouts: RolloutBatch,
    members: np.ndarray,
    advantages: np.ndarray,
    process: np.ndarray | None,
    stats: TokenStats,
    config: AdvantageConfig,
    correct: np.ndarray,
) -> torch.Tensor:
    """float64 [n], before any token is selected. advantages: [members]; process, stats and correct, the weights of the
    rollout correction: [n]"""
    lengths = rollouts.response_lengths[members]
    a = torch.from_numpy(np.repeat(advantages, lengths))
    if config.kind == "otb":
        group = group_index([rollouts.group_ids[s] for s in members], len(members))[0]
        energies = token_energies(stats.logprobs.numpy(), stats.collision.numpy()) * correct**2
        a = a - torch.from_numpy(token_baselines(advantages, group, energies, lengths, config.singleton))
    if process is not None:
        a = a + torch.from_numpy(process)
    if (shaping := config.entropy_shaping) is not None:
        a = entropy_advantages(a, stats.entropy, shaping.alpha, shaping.kappa)
    return a


def _ranges(
    advantages: torch.Tensor, stats: TokenStats, lengths: np.ndarray, config: AlgorithmConfig
) -> ModulationRanges | None:
    """Of DynaMO's modulation, over the n tokens that the arrays hold."""
    modulation, bounds = config.modulation, (config.loss.clip_ratio_low, config.loss.clip_ratio_high)
    logprobs, entropy, expected_pi_lambda = stats.logprobs, stats.entropy, stats.expected_pi_lambda
    if modulation is None or modulation.scope == "micro_batch":
        return None
    if modulation.expectation == "sequence_mean":
        owner = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
        sums = torch.zeros(len(lengths)).index_add_(0, owner, logprobs.exp() * (logprobs + entropy))
        expected_pi_lambda = (sums / torch.from_numpy(np.maximum(lengths, 1)))[owner]
    everywhere = torch.ones_like(entropy)
    change = entropy_change(advantages, logprobs, entropy, logprobs, everywhere, *bounds, expected_pi_lambda)
    return modulation_ranges(entropy, change, everywhere)
