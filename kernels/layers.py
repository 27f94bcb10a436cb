"""RoPE and SwiGLU, forward and backward: one Triton launch each on a GPU (`layer_kernels`), torch elsewhere. GeGLU and
linears that are on one rank are torch's everywhere.

Megatron's own take 8 to 20 launches each where TransformerEngine is missing, and the guards of torch.compile cost the
host more than the launches. Its linears, made for several ranks, cost it three times what the products do.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dynamo_megatron.kernels.chunked import add_product_


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


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, a, b, scale):
        y, low = F.linear(x, weight, bias), None
        if a is not None:
            low = F.linear(x.flatten(0, -2), a)
            add_product_(y.flatten(0, -2), low, b.t(), scale)
        ctx.save_for_backward(x, weight, a, b, low)
        ctx.scale = scale
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        x, weight, a, b, low = ctx.saved_tensors
        flat, x_flat = gradient.flatten(0, -2), x.flatten(0, -2)
        found: list[Tensor | None] = [None] * 6
        if ctx.needs_input_grad[0]:
            found[0] = flat.matmul(weight).view_as(x)
        if ctx.needs_input_grad[2]:
            found[2] = flat.sum(0)
        products = {1: (weight, flat, x_flat)}
        if a is not None:
            of_low = flat.matmul(b)
            products = {3: (a, of_low, x_flat), 4: (b, flat, low)}
            if found[0] is not None:
                add_product_(found[0].flatten(0, -2), of_low, a, ctx.scale)
        for at, (matrix, of_output, given) in products.items():
            add_product_(matrix.main_grad, of_output.t(), given, ctx.scale)
            if hasattr(matrix, "grad_added_to_main_grad"):  # DDP's hooks fire only for a gradient, and do not read it
                matrix.grad_added_to_main_grad = True
                found[at] = torch.empty_like(matrix)
        return tuple(found)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, adapter: tuple[Tensor, Tensor, float] | None = None):
    """x [..., in], weight [out, in] -> x weight^T + bias [..., out], in x's dtype. adapter: (a [rank, in], b [out,
    rank], scale) of LoRA (arXiv 2106.09685), which adds scale * x a^T b^T and leaves the weight frozen.

    Gradients of matrices are added to their `main_grad` by the GEMM that makes them, as by Megatron's linears.
    """
    if adapter is not None:
        return _Linear.apply(x, weight, bias, *adapter)
    if weight.requires_grad and torch.is_grad_enabled():
        return _Linear.apply(x, weight, bias, None, None, 1.0)
    return F.linear(x, weight, bias)
