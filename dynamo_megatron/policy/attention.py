"""Attention of packed sequences in plain torch, for Megatron layer specs: any device, no TransformerEngine."""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule


class PackedAttention(MegatronModule):
    """Causal attention within each segment of a packed (thd) micro-batch, one scaled-dot-product call a segment.

    query [T, heads/tp, d], key and value [T, kv heads/tp, d] -> [T, heads/tp * d]; segments are `cu_seqlens_q`.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **_):
        super().__init__(config=config)
        assert config.context_parallel_size == 1, "context parallelism is not supported by PackedAttention"
        assert config.attention_dropout == 0.0, "attention dropout is not supported by PackedAttention"
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(self, query, key, value, attention_mask, *, packed_seq_params, **_) -> torch.Tensor:
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        # A segment as a batch of one: [1, heads, l, d].
        q, k, v = (x.reshape(x.shape[0], -1, x.shape[-1]).transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        grouped = q.shape[1] != k.shape[1]
        segments = [
            F.scaled_dot_product_attention(
                q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], is_causal=True, scale=self.scale, enable_gqa=grouped
            )
            for a, b in itertools.pairwise(bounds)
        ]
        return torch.cat(segments, dim=2).squeeze(0).transpose(0, 1).flatten(1)
