"""Attention of packed sequences in plain torch, for Megatron layer specs: any device, no TransformerEngine."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.module import MegatronModule

from dynamo_megatron.policy.batch import context_positions


class PackedAttention(MegatronModule):
    """Causal attention within each segment of a packed (thd) micro-batch, one call for all segments of a length.

    query [t, heads/tp, d], key and value [t, kv heads/tp, d] -> [t, heads/tp * d]; segments are `cu_seqlens_q`, in
    positions of all context-parallel ranks together. Those ranks gather each other's keys and values.
    """

    def __init__(
        self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, pg_collection=None, **_
    ):
        super().__init__(config=config)
        assert config.attention_dropout == 0.0, "attention dropout is not supported by PackedAttention"
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.cp = pg_collection.cp

    def forward(self, query, key, value, attention_mask, *, packed_seq_params, **_) -> torch.Tensor:
        q, k, v = (x.reshape(x.shape[0], -1, x.shape[-1]) for x in (query, key, value))
        cp_rank, cp_size, here = self.cp.rank(), self.cp.size(), q.shape[0]
        if cp_size > 1:
            both = tensor_parallel.gather_from_sequence_parallel_region(
                torch.cat([k, v], dim=-1), tensor_parallel_output_grad=True, group=self.cp
            )
            k, v = both.split(k.shape[-1], dim=-1)
        grouped = q.shape[1] != k.shape[1]
        bounds = packed_seq_params.cu_seqlens_q.long()
        starts, lengths = bounds[:-1], bounds.diff()
        outputs, places = [], []
        for length in lengths.unique().tolist():
            held = torch.from_numpy(context_positions(length, cp_size)).to(q.device)
            share = length // cp_size
            first = starts[lengths == length][:, None] // cp_size
            rows = (first + torch.arange(share, device=q.device)).flatten()
            # Where the segment's positions, in order, lie in what was gathered rank by rank.
            gathered = held.flatten().argsort()
            sources = (first + (gathered // share) * here + gathered % share).flatten()
            mask = None if cp_size == 1 else held[cp_rank][:, None] >= torch.arange(length, device=q.device)
            # [t, heads, d] -> [segments, heads, length, d]
            same = (
                x[at].unflatten(0, (-1, size)).transpose(1, 2)
                for x, at, size in ((q, rows, share), (k, sources, length), (v, sources, length))
            )
            attended = F.scaled_dot_product_attention(
                *same, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=grouped
            )
            outputs.append(attended.transpose(1, 2).flatten(0, 1))
            places.append(rows)
        order = torch.cat(places).argsort()
        return torch.cat(outputs)[order].flatten(1)
