"""RoPE and SwiGLU, forward and backward: one Triton launch each on a GPU (`layer_kernels`), torch elsewhere. GeGLU and
linears that are on one rank are torch's everywhere.

Megatron's own take 8 to 20 launches each where TransformerEngine is missing, and the guards of torch.compile cost the
host more than the launches. Its linears do for one rank what several need.
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
    return _Rotate.apply(x, table, interleaved) if torch.is_grad_enabled() else _rotated(x, table, 1.0, interleaved)


def _rotated(x: Tensor, table: Tensor, sign: float, interleaved: bool = False) -> Tensor:
    if x.is_cuda:
        from dynamo_megatron.kernels import layer_kernels

        return layer_kernels.rotated(x, table, sign, interleaved)
    cosine, sine = table.unsqueeze(2).unbind()
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
        ctx.shape, ctx.scale = x.shape, scale
        x = x.flatten(0, -2)
        y, low = F.linear(x, weight, bias), None
        if a is not None:
            low = F.linear(x, a)
            add_product_(y, low, b.t(), scale)
        ctx.save_for_backward(None if a is None and not ctx.needs_input_grad[1] else x, weight, a, b, low)
        return y.view(*ctx.shape[:-1], weight.shape[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        x, weight, a, b, low = ctx.saved_tensors
        needed, gradient = ctx.needs_input_grad, gradient.flatten(0, -2)
        dx = gradient.matmul(weight) if needed[0] else None
        products = {1: (weight, gradient, x)} if needed[1] else {}  # by the place in forward's arguments
        if a is not None:
            of_low = gradient.matmul(b)
            if dx is not None:
                add_product_(dx, of_low, a, ctx.scale)
            products = {3: (a, of_low, x), 4: (b, gradient, low)}
        found = [None if dx is None else dx.view(ctx.shape), None, None, None, None, None]
        if needed[2]:
            found[2] = gradient.sum(0)
        for place, (matrix, of_output, given) in products.items():
            add_product_(matrix.main_grad, of_output.t(), given, ctx.scale)
            if hasattr(matrix, "grad_added_to_main_grad"):  # DDP's hooks fire only for a gradient, and do not read it
                matrix.grad_added_to_main_grad = True
                found[place] = torch.empty_like(matrix)
        return tuple(found)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, adapter: tuple[Tensor, Tensor, float] | None = None
) -> Tensor:
    """x [..., in], weight [out, in] -> x weight^T + bias [..., out], in x's dtype. adapter: (a [rank, in], b [out,
    rank], scale) of LoRA (arXiv 2106.09685), which adds scale * x a^T b^T; the weight must be frozen.

    Gradients of matrices are added to their `main_grad` by the GEMM that makes them, as by Megatron's linears.
    """
    if adapter is None and not torch.is_grad_enabled():
        # By the strides of an embedding's output torch would make a product of each of its tokens.
        return F.linear(x.flatten(0, -2), weight, bias).view(*x.shape[:-1], weight.shape[0])
    return _Linear.apply(x, weight, bias, *(adapter or (None, None, 1.0)))
