"""Attention of packed sequences in plain torch, for Megatron layer specs: any device, no TransformerEngine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule

from dynamo_megatron.policy.batch import context_positions, to_device


class SegmentGroup(NamedTuple):
    """The n segments of one length, and where their positions lie."""

    length: int  # positions of each segment, on all context-parallel ranks together
    rows: torch.Tensor  # int64 [n * length / cp]: indices of their queries among the t positions here
    sources: torch.Tensor  # int64 [n * length]: indices of their keys, in order, among those gathered rank by rank
    mask: torch.Tensor | None  # bool [length / cp, length]: which keys a row attends to; None: causal


class SegmentPlan(NamedTuple):
    """The groups of a micro-batch. Made on the host, so that no layer waits for a GPU to learn the lengths."""

    groups: list[SegmentGroup]  # by length, ascending
    order: torch.Tensor  # int64 [t]: from the groups' rows, one group after the other, to the positions here

    @classmethod
    def of(cls, lengths: np.ndarray, cp_rank: int, cp_size: int, device: torch.device) -> SegmentPlan:
        """lengths: int64 [segments], in positions of all context-parallel ranks together."""

        def on_device(array: np.ndarray) -> torch.Tensor:
            return to_device(torch.from_numpy(array), device)

        starts, here = np.cumsum(lengths) - lengths, int(lengths.sum()) // cp_size
        groups, places = [], []
        for length in np.unique(lengths).tolist():
            held = context_positions(length, cp_size)
            share = length // cp_size
            first = starts[lengths == length][:, None] // cp_size
            rows = (first + np.arange(share)).flatten()
            gathered = held.flatten().argsort()
            sources = (first + (gathered // share) * here + gathered % share).flatten()
            mask = None if cp_size == 1 else on_device(held[cp_rank][:, None] >= np.arange(length))
            groups.append(SegmentGroup(length, on_device(rows), on_device(sources), mask))
            places.append(rows)
        return cls(groups, on_device(np.concatenate(places).argsort()))


@dataclass
class Segments(PackedSeqParams):
    """What Megatron's layers need to know about packed sequences, and what PackedAttention needs, for all layers."""

    plan: SegmentPlan | None = None


class PackedAttention(MegatronModule):
    """Causal attention within each segment of a packed (thd) micro-batch, one call for all segments of equal length.

    query [t, heads/tp, d], key and value [t, kv heads/tp, d] -> [t, heads/tp * d]; the segments are those of
    `packed_seq_params` (`Segments`). Context-parallel ranks gather each other's keys and values.
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
        if self.cp.size() > 1:
            both = tensor_parallel.gather_from_sequence_parallel_region(
                torch.cat([k, v], dim=-1), tensor_parallel_output_grad=True, group=self.cp
            )
            k, v = both.split(k.shape[-1], dim=-1)
        grouped = q.shape[1] != k.shape[1]
        outputs = []
        plan = packed_seq_params.plan
        for length, rows, sources, mask in plan.groups:
            # [t, heads, d] -> [segments, heads, length, d]
            same = (
                x[at].unflatten(0, (-1, size)).transpose(1, 2)
                for x, at, size in ((q, rows, length // self.cp.size()), (k, sources, length), (v, sources, length))
            )
            attended = F.scaled_dot_product_attention(
                *same, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=grouped
            )
            outputs.append(attended.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs)[plan.order].flatten(1)
