"""The policy head: `token_stats` and `policy_loss`, from hidden states and a vocabulary-parallel output weight.

Logits exist for one chunk of tokens at a time. Rows whose label is `IGNORE` are left out before the first GEMM.
Every rank of `tp_group` passes the same tokens and merges the same gathered partials in the same order, so that
statistics, loss and clip decisions are bitwise equal on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dynamo_megatron.algorithm.modulation import ModulationRanges
from dynamo_megatron.config import PolicyLossConfig
from dynamo_megatron.kernels import reference
from dynamo_megatron.kernels.terms import Terms, Tokens, loss_terms

IGNORE = -100


class TokenStats(NamedTuple):
    """Per token, [T], natural log, no gradient, 0 where the label is `IGNORE`.

    float32 (float64 where hidden or weight is). p is softmax(z / temperature) over the vocabulary.
    """

    logprobs: Tensor  # log p of the label
    entropy: Tensor  # H = -sum_v p_v log p_v, nats
    expected_pi_lambda: Tensor  # E[pi Lambda] = sum_v p_v^2 (log p_v + H)
    collision: Tensor  # sum_v p_v^2


class PolicyLossOutput(NamedTuple):
    """What `policy_loss` gives; everything but `loss` is detached."""

    loss: Tensor  # scalar, sum_t w_t loss_t, equal on every rank of tp_group
    stats: TokenStats  # of the current policy
    advantages: Tensor  # [T] after modulation, 0 where the label is IGNORE
    metrics: dict[str, Tensor]  # float32 scalars, sums over this call's labelled tokens


class _Head:
    """The checked geometry of one call: labelled rows, vocabulary shard, chunks, compute dtype."""

    def __init__(self, hidden, weight, labels, temperature, vocab_size, tp_group, backend, chunk_tokens):
        if backend not in ("auto", "torch", "triton"):
            raise ValueError(f"backend: {backend!r} is none of 'auto', 'torch', 'triton'")
        if backend == "triton":
            raise ValueError("backend: 'triton' is not available; use 'auto' or 'torch'")
        if hidden.ndim != 2 or not hidden.is_floating_point():
            raise ValueError(f"hidden: needs floating point [T, h], got {hidden.dtype} {list(hidden.shape)}")
        if weight.ndim != 2 or not weight.is_floating_point() or weight.shape[1] != hidden.shape[1]:
            raise ValueError(
                f"weight: needs floating point [V/tp, {hidden.shape[1]}], got {weight.dtype} {list(weight.shape)}"
            )
        if labels.shape != hidden.shape[:1] or labels.dtype != torch.int64:
            raise ValueError(f"labels: needs int64 [{hidden.shape[0]}], got {labels.dtype} {list(labels.shape)}")
        if not (temperature > 0 and math.isfinite(temperature)):
            raise ValueError(f"temperature: {temperature} is not a positive number")
        if chunk_tokens is not None and chunk_tokens < 1:
            raise ValueError(f"chunk_tokens: {chunk_tokens} is below 1; give None for what the workspace allows")
        self.group, self.temperature = tp_group, temperature
        self.size = 1 if tp_group is None else dist.get_world_size(tp_group)
        rank = 0 if tp_group is None else dist.get_rank(tp_group)
        rows = weight.shape[0]
        vocab_size = rows * self.size if vocab_size is None else vocab_size
        if not 1 <= vocab_size <= rows * self.size:
            raise ValueError(f"vocab_size: {vocab_size} is outside [1, {rows * self.size}], the rows of all shards")
        self.shard = reference.Shard(rank * rows, rows, min(max(vocab_size - rank * rows, 0), rows))
        self.dtype = torch.float64 if torch.float64 in (hidden.dtype, weight.dtype) else torch.float32
        self.tokens = len(labels)
        self.rows = (labels != IGNORE).nonzero()[:, 0]
        self.labels = labels[self.rows]
        wrong = ((self.labels < 0) | (self.labels >= vocab_size)).nonzero()
        if len(wrong):
            at = self.rows[wrong[0, 0]].item()
            raise ValueError(
                f"labels: {labels[at].item()} at token {at} is outside [0, {vocab_size}) and not {IGNORE} (left out)"
            )
        self.chunk_tokens = chunk_tokens or reference.chunk_size(self.shard, self.dtype.itemsize)

    def chunks(self) -> Iterator[slice]:
        """Slices of the labelled rows; the same on every rank of the group, which shares the labels."""
        for start in range(0, len(self.rows), self.chunk_tokens):
            yield slice(start, min(start + self.chunk_tokens, len(self.rows)))

    def logits(self, hidden: Tensor, weight: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
        """The chunk's hidden states [c, h] and logits [c, V/tp] in the compute dtype, which `weight` has already."""
        x = hidden.index_select(0, self.rows[chunk]).to(self.dtype)
        return x, x @ weight.t()

    def statistics_(self, logits: Tensor, chunk: slice) -> tuple[reference.Statistics, Tensor]:
        """Statistics over the vocabulary, and for `logits_gradient_` the offset [c] of what the logits become."""
        part = reference.shard_statistics_(logits, self.labels[chunk], self.shard, self.temperature)
        parts = part[None]
        if self.size > 1:
            parts = part.new_empty(self.size, *part.shape)
            dist.all_gather_into_tensor(parts.view(-1, part.shape[1]), part, group=self.group)
        merged = reference.merge(parts, self.temperature)
        own = ((part[0] - merged.maximum) / self.temperature).clamp(min=reference.FLOOR)
        return merged, merged.log_sum - own

    def statistics(self, hidden: Tensor, weight: Tensor) -> reference.Statistics:
        """Statistics of all labelled rows, [n] each."""
        out = hidden.new_empty(len(reference.Statistics._fields), len(self.rows), dtype=self.dtype)
        weight = weight.to(self.dtype)
        for chunk in self.chunks():
            out[:, chunk] = torch.stack(self.statistics_(self.logits(hidden, weight, chunk)[1], chunk)[0])
        return reference.Statistics(*out)

    def scatter(self, values: Tensor) -> Tensor:
        """[n] of the labelled rows -> [T], 0 elsewhere."""
        return values.new_zeros(self.tokens).index_copy_(0, self.rows, values)

    def token_stats(self, stats: reference.Statistics) -> TokenStats:
        return TokenStats(*(self.scatter(getattr(stats, name)) for name in TokenStats._fields))


class _Gradients:
    """dX [T, h] and dW [V/tp, h], built chunk by chunk; either may be unwanted."""

    def __init__(self, head: _Head, hidden: Tensor, weight: Tensor, wanted: tuple[bool, bool]):
        self.head = head
        self.hidden = torch.zeros_like(hidden) if wanted[0] else None
        self.main = getattr(weight, "main_grad", None) if wanted[1] else None
        # A main_grad of the compute dtype takes the GEMM's result itself; any other gets one rounding at the end.
        self.direct = self.main is not None and self.main.dtype == head.dtype
        self.weight = None
        if wanted[1]:
            self.weight = self.main if self.direct else torch.zeros_like(weight, dtype=head.dtype)

    def add(self, chunk: slice, x: Tensor, weight: Tensor, shifted: Tensor, log_sum: Tensor, entropy, g_l, g_h) -> None:
        head = self.head
        dz = reference.logits_gradient_(
            shifted, head.labels[chunk], head.shard, log_sum, entropy, g_l, g_h, head.temperature
        )
        if self.hidden is not None:
            dx = dz @ weight
            if head.size > 1:
                dist.all_reduce(dx, group=head.group)
            self.hidden.index_copy_(0, head.rows[chunk], dx.to(self.hidden.dtype))
        if self.weight is not None:
            self.weight.addmm_(dz.t(), x)

    def finish(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """(dX, dW in `dtype`); dW is None where it went to main_grad."""
        if self.main is None:
            return self.hidden, None if self.weight is None else self.weight.to(dtype)
        if not self.direct:
            self.main.add_(self.weight)
        return self.hidden, None


class _PolicyGradient(torch.autograd.Function):
    """Hangs the gradient of a finished loss on the graph.

    eager: saved = (dX, dW), formed with the loss; they hold for an upstream gradient of 1 alone.
    recompute: saved = per-token vectors from which backward forms the logits' gradient with one more GEMM.
    """

    @staticmethod
    def forward(ctx, hidden, weight, loss, head, config, eager, *saved):
        ctx.head, ctx.config, ctx.eager = head, config, eager
        ctx.save_for_backward(hidden if not eager else None, weight, *saved)
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream):
        hidden, weight, *saved = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:2]
        if ctx.eager:
            if upstream.item() != 1.0:
                raise ValueError(
                    f"gradient: 'eager' formed the gradients for an upstream gradient of 1, got {upstream.item()}; "
                    "leave the loss unscaled or use 'recompute'"
                )
            dx, dw = saved
        else:
            dx, dw = _recompute(ctx.head, ctx.config, hidden, weight, wanted, upstream, *saved)
        if wanted[1] and hasattr(weight, "main_grad"):
            # Megatron's hooks want a gradient to fire, and with zero_out_wgrad they add it: exact zeros.
            weight.grad_added_to_main_grad = True
            dw = weight.new_zeros(()).expand(weight.shape)
        return dx, dw, *[None] * (len(ctx.needs_input_grad) - 2)


def _recompute(head, config, hidden, weight, wanted, upstream, maximum, log_sum, entropy, g_l, g_h):
    gradients = _Gradients(head, hidden, weight, wanted)
    w = weight.to(head.dtype)
    for chunk in head.chunks():
        x, z = head.logits(hidden, w, chunk)
        reference.shift_(z, maximum[chunk], head.temperature)
        scaled_h = upstream * g_h[chunk] if config.entropy_coef else None
        gradients.add(chunk, x, w, z, log_sum[chunk], entropy[chunk], upstream * g_l[chunk], scaled_h)
    return gradients.finish(weight.dtype)


def _sequence_mean(stats: reference.Statistics, head: _Head, cu_seqlens: Tensor) -> Tensor:
    """Mean of pi Lambda over the labelled tokens of each token's sequence, [n]."""
    labelled = torch.zeros(head.tokens + 1, dtype=torch.int64, device=head.rows.device)
    labelled[head.rows + 1] = 1
    counts = labelled.cumsum(0)[cu_seqlens.long()].diff()
    pi_lambda = stats.logprobs.exp() * (stats.logprobs + stats.entropy)
    # segment_reduce adds in a fixed order on every device, which an index_add on CUDA would not.
    return torch.segment_reduce(pi_lambda, "mean", lengths=counts).repeat_interleave(counts)


@torch.no_grad()
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
) -> TokenStats:
    """Log-probability, entropy, E[pi Lambda] and collision probability of every labelled token. No gradient.

    hidden: [T, h], weight: [V/tp, h], floating point; logits are float32 (float64 where one of them is).
    labels: int64 [T]; -100 leaves a row out. vocab_size: tokens in the vocabulary; the weight's rows from there on
    (global index) are padding and take no part. tp_group: the ranks that hold the weight's shards, in order; None:
    not sharded. chunk_tokens: rows of logits at once; None: what 2.5 GB hold. One all-gather per chunk.

    Raises ValueError naming the argument.
    """
    head = _Head(hidden, weight, labels, temperature, vocab_size, tp_group, backend, chunk_tokens)
    return head.token_stats(head.statistics(hidden, weight))


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

    hidden, weight, labels, temperature, vocab_size, tp_group, backend, chunk_tokens: as in `token_stats`.
    advantages, old_logprobs, token_weights, ref_logprobs (for the KL term): floating point [T]; what stands in rows
    labelled -100 is never read. old_logprobs None: the tokens were sampled from this very policy (ratio 1), and with an
    advantage of 1 the gradient is that of the cross-entropy. old_kl_coef: floating point [T], the coefficient of each
    token's |logprob - old logprob| (KL-Cov); None: no such term. config.modulation None: advantages are used as they
    are. ranges: entropy and entropy-change ranges of the scope; None: over this call's labelled tokens (the published
    micro-batch scope), which needs gradient "recompute". cu_seqlens: int [S+1], for expectation "sequence_mean", whose
    mean goes over a sequence's labelled tokens.

    gradient "eager" forms the gradient with the loss (3 GEMMs; 4 with "sequence_mean") and promises that the loss's
    upstream gradient is 1, checked in backward; "recompute" forms it in backward (4 GEMMs) for any upstream gradient.
    hidden.grad is complete on every rank of tp_group, so a gather of sequence-parallel shards before this call must
    split, not reduce, in its backward. dW goes to weight.main_grad where there is one (in eager mode already in this
    call), with weight.grad_added_to_main_grad set and zeros as weight.grad; else weight.grad has the weight's dtype.
    Metrics: tokens, loss (weighted), entropy and kl (nats), clipped, clipped_dual, damped (beta_stab < 0.9), boosted
    (beta_comp > 1.1).

    Raises ValueError naming the argument.
    """
    head = _Head(hidden, weight, labels, temperature, vocab_size, tp_group, backend, chunk_tokens)
    per_token = {
        "advantages": advantages,
        "token_weights": token_weights,
        "old_logprobs": old_logprobs,
        "ref_logprobs": ref_logprobs,
        "old_kl_coef": old_kl_coef,
    }
    for name, value in per_token.items():
        if value is None and name not in ("advantages", "token_weights"):
            continue
        if value.shape != labels.shape or not value.is_floating_point():
            raise ValueError(f"{name}: needs floating point [{len(labels)}], got {value.dtype} {list(value.shape)}")
    if gradient not in ("eager", "recompute"):
        raise ValueError(f"gradient: {gradient!r} is none of 'eager', 'recompute'")
    if config.modulation is not None and ranges is None and gradient == "eager":
        raise ValueError("gradient: 'eager' needs ranges; without them (micro-batch scope) use 'recompute'")
    sequence_mean = config.modulation is not None and config.modulation.expectation == "sequence_mean"
    if sequence_mean:
        if cu_seqlens is None:
            raise ValueError("cu_seqlens: needed for expectation 'sequence_mean'")
        if cu_seqlens.ndim != 1 or cu_seqlens.is_floating_point() or len(cu_seqlens) == 0:
            raise ValueError(f"cu_seqlens: needs integers [S+1], got {cu_seqlens.dtype} {list(cu_seqlens.shape)}")
        if cu_seqlens[0] != 0 or cu_seqlens[-1] != len(labels) or (cu_seqlens.diff() < 0).any():
            raise ValueError(f"cu_seqlens: needs to rise from 0 to the {len(labels)} tokens, got {cu_seqlens.tolist()}")

    wanted = tuple(torch.is_grad_enabled() and t.requires_grad for t in (hidden, weight))
    eager = gradient == "eager" and any(wanted)
    with torch.no_grad():
        tokens = Tokens(*(None if v is None else v[head.rows].to(head.dtype) for v in per_token.values()))
        if eager and not sequence_mean:
            stats, terms, saved = _eager(head, config, hidden, weight, wanted, tokens, ranges)
        else:
            stats = head.statistics(hidden, weight)
            expected = _sequence_mean(stats, head, cu_seqlens) if sequence_mean else stats.expected_pi_lambda
            terms = loss_terms(config, stats, tokens, expected, ranges)
            saved = (stats.maximum, stats.log_sum, stats.entropy, terms.grad_logprobs, terms.grad_entropy)
            if eager:
                saved = _recompute(head, config, hidden, weight, wanted, terms.loss.new_ones(()), *saved)
        loss = (tokens.weights * terms.loss).sum()
        metrics = {"tokens": torch.tensor(float(len(head.rows)), device=loss.device), "loss": loss.float()}
        metrics["entropy"] = stats.entropy.sum().float()
        for name in ("kl", "clipped", "clipped_dual", "damped", "boosted"):
            metrics[name] = getattr(terms, name).sum().float()
    if any(wanted):
        loss = _PolicyGradient.apply(hidden, weight, loss, head, config, eager, *saved)
    return PolicyLossOutput(loss, head.token_stats(stats), head.scatter(terms.advantages), metrics)


def _eager(head, config, hidden, weight, wanted, tokens, ranges):
    """One pass: a chunk's loss and gradient from the same logits. Returns (statistics, terms, (dX, dW))."""
    stats = hidden.new_empty(len(reference.Statistics._fields), len(head.rows), dtype=head.dtype)
    terms = hidden.new_empty(len(Terms._fields), len(head.rows), dtype=head.dtype)
    gradients = _Gradients(head, hidden, weight, wanted)
    w = weight.to(head.dtype)
    for chunk in head.chunks():
        x, z = head.logits(hidden, w, chunk)
        merged, log_sum = head.statistics_(z, chunk)
        t = loss_terms(config, merged, tokens.at(chunk), merged.expected_pi_lambda, ranges)
        g_h = t.grad_entropy if config.entropy_coef else None
        gradients.add(chunk, x, w, z, log_sum, merged.entropy, t.grad_logprobs, g_h)
        stats[:, chunk] = torch.stack(merged)
        terms[:, chunk] = torch.stack([v.to(head.dtype) for v in t])
    return reference.Statistics(*stats), Terms(*terms), gradients.finish(weight.dtype)
