"""The policy head: `token_stats` and `policy_loss`, from hidden states and a vocab-parallel weight.

Logits exist for one chunk of tokens at a time. Rows whose label is `IGNORE` are left out before the first GEMM.
Every rank of `tp_group` passes the same tokens and merges the same gathered partials in the same order, so that
statistics, loss and clip decisions are bitwise equal on all of them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dynamo_megatron.algorithm.modulation import ModulationRanges
from dynamo_megatron.config import PolicyLossConfig
from dynamo_megatron.kernels.chunked import ChunkedHead
from dynamo_megatron.kernels.reference import summed_loss
from dynamo_megatron.kernels.types import METRICS, Statistics, Tokens
from dynamo_megatron.types import TokenStats


class PolicyLossOutput(NamedTuple):
    """What `policy_loss` returns; everything except `loss` is detached."""

    loss: Tensor  # scalar, sum_t w_t loss_t, equal on every rank of tp_group
    stats: TokenStats  # of the current policy
    advantages: Tensor  # [T] after modulation, 0 where the label is IGNORE
    metrics: dict[str, Tensor]  # float32 scalars, sums over this call's labelled tokens


def _hand_back(weight: Tensor, dw: Tensor | None) -> Tensor | None:
    """Returns the gradient of `weight` for autograd: `dw`, or zeros where `weight` has a main_grad, to which its
    gradient went."""
    if dw is not None or not weight.requires_grad:
        return dw
    # Megatron's hooks fire only for a gradient, and with zero_out_wgrad they add it: exact zeros. These are freed once
    # the hook has run; one tensor kept for all calls would be alive beside the forward pass's workspace.
    weight.grad_added_to_main_grad = True
    return torch.zeros_like(weight)


class _EagerLoss(torch.autograd.Function):
    """Attaches (dX, dW), computed with the loss, to the graph; they are correct only for an upstream gradient of 1, and
    any other makes them NaN."""

    @staticmethod
    def forward(ctx, hidden, weight, loss, dx, dw):
        ctx.save_for_backward(weight, dx, dw)
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream):
        weight, dx, dw = ctx.saved_tensors
        # The host does not wait for the comparison; the gradient norm shows the NaN before the optimizer's step.
        poison = torch.where(upstream == 1.0, 0.0, torch.nan)
        own = weight.main_grad if dw is None and weight.requires_grad else dw
        for gradient in (dx, own):
            if gradient is not None:
                gradient.view(-1)[:1].add_(poison)
        return dx, _hand_back(weight, dw), None, None, None


class _Logprobs(torch.autograd.Function):
    """(logprobs, entropy) of the labelled rows, [n]; backward computes the logits again."""

    @staticmethod
    def forward(ctx, hidden, weight, head, stats):
        ctx.head = head
        ctx.save_for_backward(hidden, weight, *stats)
        ctx.set_materialize_grads(False)
        return stats.logprobs.clone(), stats.entropy.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, *stats = ctx.saved_tensors
        dx, dw = ctx.head.gradients(hidden, weight, Statistics(*stats), grad_logprobs, grad_entropy)
        return dx, _hand_back(weight, dw), None, None


def _sequence_mean(stats: Statistics, head: ChunkedHead, cu_seqlens: Tensor) -> Tensor:
    """Returns the mean of pi Lambda over the labelled tokens of each token's sequence, [n]."""
    labelled = torch.zeros(head.tokens + 1, dtype=torch.int64, device=stats.logprobs.device)
    labelled[1:][head.rows] = 1
    counts = labelled.cumsum(0)[cu_seqlens.long()].diff()
    pi_lambda = stats.logprobs.exp() * (stats.logprobs + stats.entropy)
    # segment_reduce adds in a fixed order on every device, which an index_add on CUDA would not; `unsafe`: the host
    # does not wait for the lengths to check them.
    means = torch.segment_reduce(pi_lambda, "mean", lengths=counts, unsafe=True)
    return means.repeat_interleave(counts, output_size=len(pi_lambda))


def _token_stats(head: ChunkedHead, stats: Statistics) -> TokenStats:
    return TokenStats(*(head.scatter(getattr(stats, name)) for name in TokenStats._fields))


def token_stats(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    backend: Literal["torch", "triton", "auto"] = "auto",
    chunk_tokens: int | None = None,
    differentiable: bool = False,
) -> TokenStats:
    """Returns log-probability (natural log), entropy (nats), E[pi Lambda] and collision probability, [T] each.

    Rows labelled -100 are 0. differentiable: log-probability and entropy are, for any loss of them (4 GEMMs with
    backward). hidden.grad and weight.grad (or main_grad) are as in `policy_loss`, and every rank of tp_group has to run
    the backward pass, with the same upstream gradients.

    hidden: [T, h], weight: [V/tp, h], floating point; logits are float32 (float64 where one of them is).
    labels: int64 [T]; -100 leaves a row out. With labels on the host the head reads nothing of a GPU.
    vocab_size: tokens in the vocabulary; the weight's rows from there on (global index) are padding and take no part.
    tp_group: the ranks that hold the weight's shards, in order; None:
    not sharded. chunk_tokens: rows of logits at once; None: as many as fit in 2.5 GB. One all-gather per chunk.

    Raises ValueError that names the argument.
    """
    head = ChunkedHead(hidden, weight, labels, temperature, vocab_size, tp_group, backend, chunk_tokens)
    with torch.no_grad():
        stats = head.statistics(hidden, weight)
    if differentiable:
        logprobs, entropy = _Logprobs.apply(hidden, weight, head, stats)
        stats = stats._replace(logprobs=logprobs, entropy=entropy)
    return _token_stats(head, stats)


def policy_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    advantages: Tensor,
    old_logprobs: Tensor | None,
    token_weights: Tensor,
    config: PolicyLossConfig,
    *,
    ref_logprobs: Tensor | None = None,
    old_kl_coef: Tensor | None = None,
    log_ratios: Tensor | None = None,
    ranges: ModulationRanges | None = None,
    cu_seqlens: Tensor | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    backend: Literal["torch", "triton", "auto"] = "auto",
    gradient: Literal["eager", "recompute"] = "eager",
    chunk_tokens: int | None = None,
) -> PolicyLossOutput:
    """The clipped policy loss with modulated advantages (arXiv 2602.19208), sum_t w_t loss_t, and its gradient.

    hidden, weight, labels, temperature, vocab_size, tp_group, backend, chunk_tokens: as in `token_stats`. The others
    are floating point [T]; their values in rows labelled -100 are never used. old_logprobs None: the tokens were
    sampled from this very policy (ratio 1), and with an advantage of 1 the gradient is that of the cross-entropy.
    old_kl_coef: of each token's |logprob - old logprob| (KL-Cov). log_ratios: in place of logprob - old logprob in the
    policy loss (that of a whole response: GSPO, RLOO), while the gradient is that of the token's own logprob; not with
    modulation. ranges: entropy and entropy-change ranges of the scope; None: over this call's labelled tokens (the
    published micro-batch scope), which needs gradient "recompute". cu_seqlens: int [S+1], rising from 0 to T, for
    expectation "sequence_mean", whose mean goes over a sequence's labelled tokens.

    gradient "eager" computes the gradient together with the loss (3 GEMMs), for an upstream gradient of 1; any other
    makes the gradients NaN. "recompute", and always with "sequence_mean", computes it in backward (4 GEMMs) for any
    upstream gradient.
    hidden.grad is complete on every rank of tp_group, so a gather of sequence-parallel shards before this call must
    split, not reduce, in its backward. dW goes to weight.main_grad where there is one (in eager mode already in this
    call), with weight.grad_added_to_main_grad set and zeros as weight.grad; else weight.grad has the weight's dtype. A
    weight that needs no gradient saves dW's GEMM.
    Metrics: tokens, loss (weighted), entropy (nats), kl (nats) and kl_square, ratio and ratio_square (of the policy
    loss); of tokens whose weight is not 0 clipped, clipped_dual, damped (beta_stab < 0.9), boosted (beta_comp > 1.1).

    Raises ValueError that names the argument.
    """
    head = ChunkedHead(hidden, weight, labels, temperature, vocab_size, tp_group, backend, chunk_tokens)
    per_token = {
        "advantages": advantages,
        "token_weights": token_weights,
        "old_logprobs": old_logprobs,
        "ref_logprobs": ref_logprobs,
        "old_kl_coef": old_kl_coef,
        "log_ratios": log_ratios,
    }
    for name, value in per_token.items():
        if value is not None and (value.shape != labels.shape or not value.is_floating_point()):
            raise ValueError(f"{name}: needs floating point [{len(labels)}], got {value.dtype} {list(value.shape)}")
    if config.modulation is not None and ranges is None and gradient == "eager":
        raise ValueError("gradient: 'eager' needs ranges; without them (micro-batch scope) use 'recompute'")
    sequence_mean = config.modulation is not None and config.modulation.expectation == "sequence_mean"
    trains = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    eager = gradient == "eager" and trains and not sequence_mean
    with torch.no_grad():
        tokens = Tokens(*(None if v is None else head.take(v) for v in per_token.values()))
        if eager:
            stats, terms, gradients = head.loss_and_gradients(hidden, weight, config, tokens, ranges)
        else:
            stats = head.statistics(hidden, weight)
            expected = _sequence_mean(stats, head, cu_seqlens) if sequence_mean else stats.expected_pi_lambda
    if eager:
        *_, advantages, sums = terms
        loss = _EagerLoss.apply(hidden, weight, sums[0], *gradients)
    else:
        logprobs, entropy = _Logprobs.apply(hidden, weight, head, stats)
        _, advantages, sums = summed_loss(config, logprobs, entropy, tokens, expected, ranges)
        loss = sums[0].clone()  # Megatron's pipelines free it after the last stage's forward pass, and free no view
    metrics = {"tokens": torch.full((), float(head.count), device=hidden.device)}
    metrics |= dict(zip(METRICS, sums.detach().float(), strict=True))
    return PolicyLossOutput(loss, _token_stats(head, stats), head.scatter(advantages), metrics)
