"""The policy loss of labelled tokens in PyTorch, and its derivatives with respect to logprob and entropy."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dynamo_megatron.algorithm.losses import MAX_LOG_RATIO, policy_loss_terms
from dynamo_megatron.algorithm.modulation import ModulationRanges, entropy_change, modulate, modulation_ranges
from dynamo_megatron.config import PolicyLossConfig
from dynamo_megatron.kernels.types import BOOSTED, DAMPED, Statistics, Terms, Tokens


class Loss(NamedTuple):
    """The loss of some labelled tokens; `loss` and sums[0] are differentiable with respect to logprobs and entropy."""

    loss: Tensor  # [n], without weights
    advantages: Tensor  # [n], after modulation
    sums: Tensor  # [10], of METRICS; sums[0] is sum_t w_t loss_t


def summed_loss(
    config: PolicyLossConfig,
    logprobs: Tensor,
    entropy: Tensor,
    tokens: Tokens,
    expected_pi_lambda: Tensor,
    ranges: ModulationRanges | None,
) -> Loss:
    """Returns the loss of labelled tokens with modulated advantages; inputs are [n] each. ranges None: over these
    tokens."""
    advantages = tokens.advantages
    logp, h = logprobs.detach(), entropy.detach()
    old_logprobs = logp if tokens.old_logprobs is None else tokens.old_logprobs
    damped = boosted = torch.zeros_like(advantages)
    if config.modulation is not None and len(advantages):
        m = config.modulation
        mask = torch.ones_like(advantages)
        change = entropy_change(
            advantages,
            logp,
            h,
            old_logprobs,
            mask,
            config.clip_ratio_low,
            config.clip_ratio_high,
            expected_pi_lambda=expected_pi_lambda,
        )
        if ranges is None:
            ranges = modulation_ranges(h, change, mask)
        modulated = modulate(
            advantages, h, change, ranges, alpha=m.alpha, lambda_min=m.lambda_min, gamma=m.gamma, tau=m.tau
        )
        advantages = modulated.advantages
        damped, boosted = modulated.beta_stab < DAMPED, modulated.beta_comp > BOOSTED
    loss = policy_loss_terms(
        logprobs,
        entropy,
        old_logprobs,
        advantages,
        tokens.ref_logprobs,
        config,
        tokens.old_kl_coef,
        tokens.log_ratios,
    )
    kl = torch.zeros_like(advantages) if loss.kl is None else loss.kl.detach()
    log_ratios = logp - old_logprobs if tokens.log_ratios is None else tokens.log_ratios
    ratio = log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    counts = (loss.clipped, loss.clipped_dual, damped, boosted)
    values = (h, kl, kl.square(), ratio, ratio.square(), *counts)
    sums = [(tokens.weights * loss.loss).sum(), *(v.sum(dtype=logp.dtype) for v in values)]
    return Loss(loss.loss, advantages, torch.stack(sums))


def loss_terms(
    config: PolicyLossConfig,
    stats: Statistics,
    tokens: Tokens,
    expected_pi_lambda: Tensor,
    ranges: ModulationRanges | None,
) -> Terms:
    """Returns `summed_loss` of tokens with these statistics, and its gradients."""
    with torch.enable_grad():
        logprobs = stats.logprobs.detach().requires_grad_()
        entropy = stats.entropy.detach().requires_grad_()
        loss = summed_loss(config, logprobs, entropy, tokens, expected_pi_lambda, ranges)
        grads = torch.autograd.grad(loss.sums[0], (logprobs, entropy), allow_unused=True, materialize_grads=True)
    return Terms(*grads, loss.advantages, loss.sums.detach())
