"""What happens to one chunk of logits, in PyTorch: statistics, their merge over vocabulary shards, the gradient.

With z the logits, T the temperature, m a row's largest logit and d_j = (z_j - m) / T <= 0, a shard keeps
    s = sum e^d,  u = sum d e^d,  s2 = sum e^2d,  u2 = sum d e^2d
from which, over the whole vocabulary,
    logp = (z_y - m)/T - log s,  H = log s - u/s,  sum p^2 = s2/s^2,  sum p^2 log p = (u2 - s2 log s)/s^2.
Subtracting m before dividing keeps H exact to rounding where |z| is large; lse - sum p z would cancel.
Row statistics are [6, c] tensors so that one all-gather carries them.

The functions from `workspace_buffers` to `logits_gradient_` are the interface of a backend; `triton_backend` has them,
too. `summed_loss` and `loss_terms` are the policy loss of tokens whose statistics are known.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dynamo_megatron.algorithm.losses import MAX_LOG_RATIO, policy_loss_terms
from dynamo_megatron.algorithm.modulation import ModulationRanges, entropy_change, modulate, modulation_ranges
from dynamo_megatron.config import PolicyLossConfig
from dynamo_megatron.kernels.types import BOOSTED, DAMPED, Shard, Statistics, Terms, Tokens

# e^FLOOR is exactly 0 in float32 and in float64, and FLOOR is finite: -inf logits never make 0 * inf.
FLOOR = -1000.0


def finite_maximum(maximum: Tensor) -> Tensor:
    """Returns `maximum`, with 0 where a row has nothing but -inf: -inf - -inf would be NaN. NaN stays."""
    return maximum.masked_fill(maximum == -torch.inf, 0.0)


def _owned(labels: Tensor, shard: Shard) -> tuple[Tensor, Tensor]:
    local = labels - shard.start
    return (local >= 0) & (local < shard.columns), local.clamp(0, shard.columns - 1)


def workspace_buffers(operand: torch.dtype, device: torch.device) -> int:
    """Returns how many [c, V/tp] tensors of the compute dtype are alive at once: the logits and one temporary."""
    return 2


def operand_dtype(hidden: torch.dtype, weight: torch.dtype, compute: torch.dtype) -> torch.dtype:
    """Returns the dtype of the GEMMs' operands; their results have the compute dtype."""
    return compute


def shard_statistics_(logits: Tensor, labels: Tensor, shard: Shard, temperature: float) -> tuple[Tensor, Tensor]:
    """Returns (m, s, u, s2, u2, z_y) of this shard, [6, c], and what was subtracted from each row of the logits, [c].

    z_y is 0 where the label is in another shard. logits [c, V/tp] are left as z - m, for `logits_gradient_`. An
    all-padding shard gives m = -inf and zeros, which do not change a merge.
    """
    part = logits.new_zeros(6, logits.shape[0])
    part[0] = -torch.inf
    if shard.columns == 0:
        return part, finite_maximum(part[0])
    z = logits[:, : shard.columns]
    owned, column = _owned(labels, shard)
    part[0] = z.amax(1)
    part[5] = torch.where(owned, z.gather(1, column[:, None])[:, 0], 0.0)
    shift = finite_maximum(part[0])
    z.sub_(shift[:, None]).clamp_(min=FLOOR * temperature)
    e = torch.div(z, temperature).exp_()
    part[1] = e.sum(1)
    part[2] = e.mul_(z).sum(1) / temperature
    torch.mul(z, 2 / temperature, out=e).exp_()
    part[3] = e.sum(1)
    part[4] = e.mul_(z).sum(1) / temperature
    return part, shift


def merge(parts: Tensor, temperature: float, out: Tensor | None = None) -> Statistics:
    """Returns statistics over the vocabulary from all shards' [tp, 6, c], summed in the order of the ranks; also in the
    first rows of `out`, [6 or more, c]."""
    m, s, u, s2, u2, target = parts.unbind(1)
    maximum = finite_maximum(m.amax(0))
    d = ((m - maximum) / temperature).clamp(min=FLOOR)
    a = d.exp()
    u2 = (a * a * (u2 + d * s2)).sum(0)
    s2 = (a * a * s2).sum(0)
    u = (a * (u + d * s)).sum(0)
    s = (a * s).sum(0)
    log_sum = s.log()
    entropy = log_sum - u / s
    collision = s2 / (s * s)
    found = Statistics(
        maximum=maximum,
        log_sum=log_sum,
        logprobs=(target.sum(0) - maximum) / temperature - log_sum,
        entropy=entropy,
        expected_pi_lambda=(u2 - s2 * log_sum) / (s * s) + entropy * collision,
        collision=collision,
    )
    if out is not None:
        out[: len(found)] = torch.stack(found)
    return found


def merge_with_loss(
    parts: Tensor,
    temperature: float,
    config: PolicyLossConfig,
    tokens: Tokens,
    ranges: ModulationRanges | None,
    out: Tensor | None = None,
) -> tuple[Statistics, Terms]:
    """`merge`, then the loss of these tokens with the exact expectation, and its gradients, which with the advantages
    are the last rows of `out`, [9, c]."""
    stats = merge(parts, temperature, out)
    terms = loss_terms(config, stats, tokens, stats.expected_pi_lambda, ranges)
    if out is not None:
        out[len(stats) :] = torch.stack(terms[:3])
    return stats, terms


def logits_gradient_(
    logits: Tensor,
    labels: Tensor,
    shard: Shard,
    maximum: Tensor,
    log_sum: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    temperature: float,
    operand: torch.dtype,
) -> Tensor:
    """In place, z -> dL/dz = [g_l (1[j = y] - p_j) - g_H p_j (log p_j + H)] / T; padding columns become 0.

    log p = (logits - maximum) / T - log_sum for logits [c, V/tp]; the other tensors are [c]. grad_entropy None: 0.
    The result, [c, V/tp], has the operands' dtype.
    """
    logits[:, shard.columns :] = 0.0
    if shard.columns == 0:
        return logits
    z = logits[:, : shard.columns]
    owned, column = _owned(labels, shard)
    g = grad_logprobs / temperature
    z.sub_(maximum[:, None]).div_(temperature).clamp_(min=FLOOR).sub_(log_sum[:, None])
    if grad_entropy is None:
        z.exp_().mul_(-g[:, None])
    else:
        p = z.exp()
        z.add_(entropy[:, None]).mul_(-grad_entropy[:, None] / temperature).sub_(g[:, None]).mul_(p)
    z[torch.arange(len(z), device=z.device), column] += torch.where(owned, g, 0.0)
    return logits


def summed_loss(
    config: PolicyLossConfig,
    logprobs: Tensor,
    entropy: Tensor,
    tokens: Tokens,
    expected_pi_lambda: Tensor,
    ranges: ModulationRanges | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns loss [n] without weights, advantages [n] after modulation, and sums [10] of METRICS, the first of them
    sum_t w_t loss_t, of labelled tokens; inputs are [n] each. ranges None: over these tokens. Loss and first sum are
    differentiable with respect to logprobs and entropy."""
    advantages = tokens.advantages
    logp, h = logprobs.detach(), entropy.detach()
    old_logprobs = logp if tokens.old_logprobs is None else tokens.old_logprobs
    damped = boosted = torch.zeros_like(advantages)
    if config.modulation is not None and len(advantages):
        m = config.modulation
        mask = torch.ones_like(advantages)
        bounds = config.clip_ratio_low, config.clip_ratio_high
        change = entropy_change(advantages, logp, h, old_logprobs, mask, *bounds, expected_pi_lambda)
        if ranges is None:
            ranges = modulation_ranges(h, change, mask)
        modulated = modulate(
            advantages, h, change, ranges, alpha=m.alpha, lambda_min=m.lambda_min, gamma=m.gamma, tau=m.tau
        )
        advantages = modulated.advantages
        damped, boosted = modulated.beta_stab < DAMPED, modulated.beta_comp > BOOSTED
    loss = policy_loss_terms(
        logprobs, entropy, old_logprobs, advantages, tokens.ref_logprobs, config, tokens.old_kl_coef, tokens.log_ratios
    )
    kl = torch.zeros_like(advantages) if loss.kl is None else loss.kl.detach()
    log_ratios = logp - old_logprobs if tokens.log_ratios is None else tokens.log_ratios
    ratio = log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    counts = (counted * (tokens.weights != 0) for counted in (loss.clipped, loss.clipped_dual, damped, boosted))
    values = (h, kl, kl.square(), ratio, ratio.square(), *counts)
    sums = [(tokens.weights * loss.loss).sum(), *(v.sum(dtype=logp.dtype) for v in values)]
    return loss.loss, advantages, torch.stack(sums)


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
        _, advantages, sums = summed_loss(config, logprobs, entropy, tokens, expected_pi_lambda, ranges)
        grads = torch.autograd.grad(sums[0], (logprobs, entropy), allow_unused=True, materialize_grads=True)
    return Terms(*grads, advantages, sums.detach())
