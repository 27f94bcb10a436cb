"""Attention of packed sequences in plain torch, for Megatron layer specs: any device, no TransformerEngine."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule


class PackedAttention(MegatronModule):
    """Causal attention within each segment of a packed (thd) micro-batch, one call for all segments of a length.

    query [T, heads/tp, d], key and value [T, kv heads/tp, d] -> [T, heads/tp * d]; segments are `cu_seqlens_q`.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **_):
        super().__init__(config=config)
        assert config.context_parallel_size == 1, "context parallelism is not supported by PackedAttention"
        assert config.attention_dropout == 0.0, "attention dropout is not supported by PackedAttention"
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(self, query, key, value, attention_mask, *, packed_seq_params, **_) -> torch.Tensor:
        q, k, v = (x.reshape(x.shape[0], -1, x.shape[-1]) for x in (query, key, value))
        grouped = q.shape[1] != k.shape[1]
        bounds = packed_seq_params.cu_seqlens_q.long()
        starts, lengths = bounds[:-1], bounds.diff()
        outputs, places = [], []
        for length in lengths.unique().tolist():
            rows = (starts[lengths == length][:, None] + torch.arange(length, device=bounds.device)).flatten()
            # [T, heads, d] -> [segments, heads, length, d]
            same = (x[rows].unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v))
            attended = F.scaled_dot_product_attention(*same, is_causal=True, scale=self.scale, enable_gqa=grouped)
            outputs.append(attended.transpose(1, 2).flatten(0, 1))
            places.append(rows)
        order = torch.cat(places).argsort()
        return torch.cat(outputs)[order].flatten(1)
