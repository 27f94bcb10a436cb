"""flash-attn's functions, by torch's own FlashAttention 2: `flash_attn` of the archive peers, where its wheel has none
for this torch. The modules beside it are flash-attn's own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

flash_attn_with_kvcache = None  # for generation


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Of packed queries [T, heads, d] and keys and values [T, groups, d], bounds int32; returns as the queries."""
    assert not dropout_p
    left, right = window_size
    bounds = (cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k))
    return varlen_attn(q, k, v, *bounds, scale=softmax_scale, window_size=(left, 0 if causal else right))


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Of [rows, tokens, heads, d], without padding."""
    rows, length = q.shape[:2]
    bounds = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=q.device)
    packed = (x.flatten(0, 1) for x in (q, k, v))
    sizes = (bounds, bounds, length, length)
    return flash_attn_varlen_func(*packed, *sizes, dropout_p, softmax_scale, causal, window_size).view(q.shape)
