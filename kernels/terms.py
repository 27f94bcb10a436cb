"""The policy loss of each labelled token and its derivatives by logprob and entropy: what the head multiplies out."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dynamo_megatron.algorithm.losses import policy_loss_terms
from dynamo_megatron.algorithm.modulation import ModulationRanges, entropy_change, modulate, modulation_ranges
from dynamo_megatron.config import PolicyLossConfig
from dynamo_megatron.kernels.reference import Statistics

DAMPED, BOOSTED = 0.9, 1.1  # a token counts as damped where beta_stab is below, as boosted where beta_comp is above


class Terms(NamedTuple):
    """The policy loss per labelled token, [n] each; the gradients are of sum_t w_t loss_t."""

    grad_logprobs: Tensor
    grad_entropy: Tensor
    advantages: Tensor
    loss: Tensor
    kl: Tensor
    clipped: Tensor
    clipped_dual: Tensor
    damped: Tensor
    boosted: Tensor


class Tokens(NamedTuple):
    """The caller's constants per labelled token, [n] each."""

    advantages: Tensor
    weights: Tensor
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None = None
    old_kl_coef: Tensor | None = None

    def at(self, chunk: slice) -> Tokens:
        return Tokens(*(None if t is None else t[chunk] for t in self))


def loss_terms(
    config: PolicyLossConfig,
    stats: Statistics,
    tokens: Tokens,
    expected_pi_lambda: Tensor,
    ranges: ModulationRanges | None,
) -> Terms:
    """Modulation, loss and its derivatives for some labelled tokens; ranges None: over these tokens."""
    advantages = tokens.advantages
    old_logprobs = stats.logprobs if tokens.old_logprobs is None else tokens.old_logprobs
    damped = boosted = torch.zeros_like(advantages)
    if config.modulation is not None and len(advantages):
        m = config.modulation
        mask = torch.ones_like(advantages)
        change = entropy_change(
            advantages,
            stats.logprobs,
            stats.entropy,
            old_logprobs,
            mask,
            config.clip_ratio_low,
            config.clip_ratio_high,
            expected_pi_lambda=expected_pi_lambda,
        )
        if ranges is None:
            ranges = modulation_ranges(stats.entropy, change, mask)
        modulated = modulate(
            advantages, stats.entropy, change, ranges, alpha=m.alpha, lambda_min=m.lambda_min, gamma=m.gamma, tau=m.tau
        )
        advantages = modulated.advantages
        damped, boosted = modulated.beta_stab < DAMPED, modulated.beta_comp > BOOSTED
    with torch.enable_grad():
        logprobs = stats.logprobs.detach().requires_grad_()
        entropy = stats.entropy.detach().requires_grad_()
        loss = policy_loss_terms(
            logprobs, entropy, old_logprobs, advantages, tokens.ref_logprobs, config, tokens.old_kl_coef
        )
        grads = torch.autograd.grad(
            (tokens.weights * loss.loss).sum(), (logprobs, entropy), allow_unused=True, materialize_grads=True
        )
    return Terms(
        *grads,
        advantages,
        loss=loss.loss.detach(),
        kl=torch.zeros_like(advantages) if loss.kl is None else loss.kl.detach(),
        clipped=loss.clipped,
        clipped_dual=loss.clipped_dual,
        damped=damped,
        boosted=boosted,
    )
