"""RoPE and SwiGLU as Triton kernels, with the contract of `layers`: each reads its input once, computes in float32 and
rounds once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # columns of SwiGLU at once
HEADS = 16  # at most, that a program rotates
OPTIONS = {"enable_fp_fusion": False}  # results do not depend on a Triton version's default


@triton.jit
def rotate_kernel(
    x, table, out, sign, heads, half, row_stride, head_stride, sines, step, gap, H: tl.constexpr, HALF: tl.constexpr
):
    """A program takes a position and H heads. x [t, heads, 2 half], out the same, contiguous; table float32: cosines
    [t, half], and `sines` elements further sines. sign -1: the rotation back. The pairs of a head begin at every
    `step`-th element, and their second elements are `gap` further."""
    row = tl.program_id(0).to(tl.int64)
    head, column = tl.program_id(1) * H + tl.arange(0, H)[:, None], tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (column < half)
    cosine = tl.load(table + row * half + column, column < half)
    sine = tl.load(table + sines + row * half + column, column < half) * sign
    at = x + row * row_stride + head * head_stride + column * step
    a = tl.load(at, inside).to(tl.float32)
    b = tl.load(at + gap, inside).to(tl.float32)
    to = out + (row * heads + head) * 2 * half + column * step
    tl.store(to, a * cosine - b * sine, inside)
    tl.store(to + gap, b * cosine + a * sine, inside)


@triton.jit
def swiglu_kernel(y, weights, out, width, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """A program takes a row. y [t, 2 width] contiguous, weights [t], out [t, width]."""
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        a = tl.load(y + row * 2 * width + column, inside).to(tl.float32)
        b = tl.load(y + row * 2 * width + width + column, inside).to(tl.float32)
        value = a * tl.sigmoid(a) * b
        if WEIGHTED:
            value *= tl.load(weights + row).to(tl.float32)
        tl.store(out + row * width + column, value, inside)


@triton.jit
def swiglu_gradient_kernel(gradient, y, weights, out, sums, width, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """A program takes a row. gradient [t, width] and y [t, 2 width], contiguous; out [t, 2 width]: the gradient of y;
    sums [t]: that of the weights."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        g = tl.load(gradient + row * width + column, inside, 0.0).to(tl.float32)
        a = tl.load(y + row * 2 * width + column, inside, 0.0).to(tl.float32)
        b = tl.load(y + row * 2 * width + width + column, inside, 0.0).to(tl.float32)
        s = tl.sigmoid(a)
        silu = a * s
        if WEIGHTED:
            total += g * silu * b
            g *= tl.load(weights + row).to(tl.float32)
        tl.store(out + row * 2 * width + column, g * b * (s + silu * (1.0 - s)), inside)
        tl.store(out + row * 2 * width + width + column, g * silu, inside)
    if WEIGHTED:
        tl.store(sums + row, tl.sum(total, 0))


def rotated(x: Tensor, table: Tensor, sign: float, interleaved: bool = False) -> Tensor:
    t, heads, d = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    group = min(HEADS, triton.next_power_of_2(heads))
    strides = (x.stride(0), x.stride(1), table.stride(0), *((2, 1) if interleaved else (1, d // 2)))
    blocks = {"H": group, "HALF": triton.next_power_of_2(d // 2)}
    rotate_kernel[(t, triton.cdiv(heads, group))](x, table, out, sign, heads, d // 2, *strides, **blocks, **OPTIONS)
    return out


def swiglu(y: Tensor, weights: Tensor | None) -> Tensor:
    y = y.contiguous()
    rows, width = y.shape[0], y.shape[1] // 2
    out = y.new_empty(rows, width)
    given = weights is not None
    w = weights.contiguous() if given else y
    swiglu_kernel[(rows,)](y, w, out, width, WEIGHTED=given, BLOCK=BLOCK, **OPTIONS)
    return out


def swiglu_gradient(gradient: Tensor, y: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    gradient, y = gradient.contiguous(), y.contiguous()
    rows, width = gradient.shape
    out, given = torch.empty_like(y), weights is not None
    w = weights.contiguous() if given else y
    sums = torch.empty_like(w) if given else out
    swiglu_gradient_kernel[(rows,)](gradient, y, w, out, sums, width, WEIGHTED=given, BLOCK=BLOCK, **OPTIONS)
    return out, sums if given else None
