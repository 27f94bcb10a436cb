"""torch's attention of packed sequences in one call, for 16-bit types on a GPU; with attention sinks too."""

from __future__ import annotations

import inspect

import torch

try:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn
except ImportError:
    varlen_attn = None
PARAMETERS = inspect.signature(varlen_attn).parameters if varlen_attn else {}
AT_ONCE = "window_size" in PARAMETERS and "scale" in PARAMETERS  # torch >= 2.11
# Later versions require it for fewer key/value heads, earlier ones do not know it.
GROUPED = {"enable_gqa": True} if "enable_gqa" in PARAMETERS else {}

Bounds = tuple[torch.Tensor, int]  # of the segments: int32 [segments + 1] where they start and end; the longest


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: Bounds,
    scale: float,
    window: tuple[int, int],
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention within segments: q [t, heads, d], k and v [t, kv heads, d] -> [t, heads, d]. `window`: tokens
    before (-1: all) and after that a query sees. `sinks` [heads]: logits beside the scores of every query."""
    if sinks is not None:
        return SinkAttention.apply(q, k, v, sinks, bounds, scale, window)
    (ends, longest), options = bounds, {"scale": scale, "window_size": window, **GROUPED}
    return varlen_attn(q, k, v, ends, ends, longest, longest, **options)


class SinkAttention(torch.autograd.Function):
    """A sink takes its part of the softmax and adds nothing to the output: the output without sinks times
    exp(lse - l), where l = log(exp(lse) + exp(sink)).

    The kernel's backward pass computes the probabilities from scores and lse, p = exp(s - lse), and the scores'
    gradient from them and the output, p (dp - sum(output gradient)). From l and the output with sinks it thus computes
    the gradients of attention with sinks. A sink's own has dp = 0: -sum(exp(sink - l) sum(output gradient)).
    """

    @staticmethod
    def forward(ctx, q, k, v, sinks, bounds: Bounds, scale: float, window: tuple[int, int]) -> torch.Tensor:
        (ends, longest), options = bounds, {"scale": scale, "window_size": window, **GROUPED}
        aux = AuxRequest(lse=True)
        output, lse = varlen_attn(q, k, v, ends, ends, longest, longest, return_aux=aux, **options)
        assert lse.shape == (q.shape[1], q.shape[0]), f"torch's lse is not [heads, t]: {list(lse.shape)}"
        whole = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
        output = (output * (lse - whole).exp().t()[..., None]).to(output.dtype)
        ctx.save_for_backward(q, k, v, sinks, output, whole, ends)
        ctx.longest, ctx.scale, ctx.window = longest, scale, window
        return output

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        q, k, v, sinks, output, whole, ends = ctx.saved_tensors
        bounds = (ends, ends, ctx.longest, ctx.longest)  # of queries and of keys
        of_qkv = torch.ops.aten._flash_attention_backward(
            *(gradient, q, k, v, output, whole),
            *bounds,
            0.0,
            ctx.window == (-1, 0),
            torch.zeros(2, dtype=torch.uint64, device=q.device),  # of dropout
            torch.empty(0, device=q.device),
            scale=ctx.scale,
            window_size_left=ctx.window[0],
            window_size_right=ctx.window[1],
        )
        products = (gradient.to(whole.dtype) * output).sum(-1).t()  # [heads, t]
        of_sinks = -((sinks.to(whole.dtype)[:, None] - whole).exp() * products).sum(1)
        return *of_qkv, of_sinks.to(sinks.dtype), None, None, None
