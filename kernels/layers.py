"""RoPE and SwiGLU, forward and backward: one Triton launch each on a GPU (`layer_kernels`), torch elsewhere. GeGLU is
torch's everywhere.

Megatron's own take 8 to 20 launches each where TransformerEngine is missing, and the guards of torch.compile cost the
host more than the launches.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rotary_table(positions: Tensor, frequencies: Tensor) -> Tensor:
    """float32 [2, t, d / 2]: cosines and sines of the angles of positions [t] at inverse frequencies [d / 2]."""
    angles = positions.float()[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()])


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, table, interleaved):
        ctx.save_for_backward(table)
        ctx.interleaved = interleaved
        return _rotated(x, table, 1.0, interleaved)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return _rotated(gradient, *ctx.saved_tensors, -1.0, ctx.interleaved), None, None


def rotate(x: Tensor, table: Tensor, interleaved: bool = False) -> Tensor:
    """RoPE (arXiv 2104.09864) of x [t, heads, d]: (a, b) -> (a cos - b sin, b cos + a sin), in x's dtype; a and b are
    the halves of a head, or with `interleaved` its even and odd elements.

    table: float32 [2, t, d / 2], of `rotary_table`. On a GPU in float32, rounded once.
    """
    return _Rotate.apply(x, table, interleaved)


def _rotated(x: Tensor, table: Tensor, sign: float, interleaved: bool = False) -> Tensor:
    if x.is_cuda:
        from dynamo_megatron.kernels import layer_kernels

        return layer_kernels.rotated(x, table, sign, interleaved)
    cosine, sine = table[:, :, None]
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    turned = [torch.sub(a * cosine, b * sine, alpha=sign), torch.add(b * cosine, a * sine, alpha=sign)]
    return (torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)).to(x.dtype)


def swiglu(y: Tensor, weights: Tensor | None = None) -> Tensor:
    """silu(a) * b of y [t, 2 f] = (a, b), times weights [t, 1] where they are given: [t, f], in y's dtype; on a GPU in
    float32, rounded once."""
    if y.is_cuda:
        from dynamo_megatron.kernels import layer_kernels

        return layer_kernels.swiglu(y, weights)
    a, b = y.chunk(2, -1)
    value = F.silu(a) * b
    return value if weights is None else (value * weights).to(y.dtype)


def swiglu_gradient(gradient: Tensor, y: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """The gradients of y, [t, 2 f], and of the weights for that of `swiglu(y, weights)`, [t, f]."""
    if y.is_cuda:
        from dynamo_megatron.kernels import layer_kernels

        return layer_kernels.swiglu_gradient(gradient, y, weights)
    dtype, of_weights = y.dtype, None
    if weights is not None:
        y, wide = y.to(weights.dtype), gradient.to(weights.dtype)
        of_weights, gradient = (swiglu(y) * wide).sum(-1, keepdim=True), wide * weights
    a, b = y.chunk(2, -1)
    parts = [torch.ops.aten.silu_backward(gradient * b, a), gradient * F.silu(a)]
    return torch.cat(parts, -1).to(dtype), of_weights


def geglu(y: Tensor) -> Tensor:
    """gelu(a) * b of y [t, 2 f] = (a, b), gelu by its tanh formula: [t, f], in y's dtype."""
    a, b = y.chunk(2, -1)
    return F.gelu(a, approximate="tanh") * b


def geglu_gradient(gradient: Tensor, y: Tensor) -> Tensor:
    """The gradient of y, [t, 2 f], for that of `geglu(y)`, [t, f]."""
    a, b = y.chunk(2, -1)
    of_gate = torch.ops.aten.gelu_backward(gradient * b, a, approximate="tanh")
    return torch.cat([of_gate, gradient * F.gelu(a, approximate="tanh")], -1)
