"""RoPE and SwiGLU as Triton kernels, with the contract of `layers`: each reads its input once, computes in float32 and
rounds once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # columns of a SwiGLU program


@triton.jit
def rotate_kernel(
    x, table, out, sign, heads, half, row_stride, head_stride, sines, HEADS: tl.constexpr, HALF: tl.constexpr
):
    """One program per position. x [t, heads, 2 half], out the same, contiguous; table float32: cosines [t, half], and
    `sines` elements further sines. sign -1: the rotation back."""
    row = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (column < half)
    cosine = tl.load(table + row * half + column, column < half)
    sine = tl.load(table + sines + row * half + column, column < half) * sign
    at = x + row * row_stride + head * head_stride + column
    a = tl.load(at, inside).to(tl.float32)
    b = tl.load(at + half, inside).to(tl.float32)
    to = out + (row * heads + head) * 2 * half + column
    tl.store(to, a * cosine - b * sine, inside)
    tl.store(to + half, b * cosine + a * sine, inside)


@triton.jit
def swiglu_kernel(y, out, width, BLOCK: tl.constexpr):
    """y [t, 2 width] contiguous, out [t, width] = silu(first half) * second half."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    a = tl.load(y + row * 2 * width + column, inside).to(tl.float32)
    b = tl.load(y + row * 2 * width + width + column, inside).to(tl.float32)
    tl.store(out + row * width + column, a * tl.sigmoid(a) * b, inside)


@triton.jit
def swiglu_gradient_kernel(gradient, y, out, width, BLOCK: tl.constexpr):
    """gradient [t, width] and y [t, 2 width], contiguous; out [t, 2 width]: the gradient of y."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    g = tl.load(gradient + row * width + column, inside).to(tl.float32)
    a = tl.load(y + row * 2 * width + column, inside).to(tl.float32)
    b = tl.load(y + row * 2 * width + width + column, inside).to(tl.float32)
    s = tl.sigmoid(a)
    silu = a * s
    tl.store(out + row * 2 * width + column, g * b * (s + silu * (1.0 - s)), inside)
    tl.store(out + row * 2 * width + width + column, g * silu, inside)


def rotated(x: Tensor, table: Tensor, sign: float) -> Tensor:
    t, heads, d = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    blocks = {"HEADS": triton.next_power_of_2(heads), "HALF": triton.next_power_of_2(d // 2)}
    strides = (x.stride(0), x.stride(1), table.stride(0))
    rotate_kernel[(t,)](x, table, out, sign, heads, d // 2, *strides, **blocks)
    return out


def swiglu(y: Tensor) -> Tensor:
    y = y.contiguous()
    rows, width = y.shape[0], y.shape[1] // 2
    out = y.new_empty(rows, width)
    swiglu_kernel[(rows, triton.cdiv(width, BLOCK))](y, out, width, BLOCK=BLOCK)
    return out


def swiglu_gradient(gradient: Tensor, y: Tensor) -> Tensor:
    gradient, y = gradient.contiguous(), y.contiguous()
    rows, width = gradient.shape
    out = torch.empty_like(y)
    swiglu_gradient_kernel[(rows, triton.cdiv(width, BLOCK))](gradient, y, out, width, BLOCK=BLOCK)
    return out
