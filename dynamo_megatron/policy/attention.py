"""Causal attention of packed sequences without TransformerEngine, and what it has to know of a micro-batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention

from dynamo_megatron.policy.batch import context_positions, to_device
from dynamo_megatron.policy.routing import Routing

if torch.cuda.is_available():  # a CPU rank has no use for it, nor for torch's compiler, which comes with it: 23 MB
    from dynamo_megatron.policy import varlen


class SegmentGroup(NamedTuple):
    """The n segments of one length, and where their positions lie."""

    length: int  # positions of each segment, on all context-parallel ranks together
    # int64 [n * length / cp]: indices of their queries among the t positions here; None: all of these, in order
    rows: torch.Tensor | None
    # int64 [n * length]: indices of their keys, in order, among those gathered rank by rank; None: as `rows`
    sources: torch.Tensor | None
    mask: torch.Tensor | None  # bool [length / cp, length]: which keys a row attends to; None: causal
    local_mask: torch.Tensor | None = None  # the same in layers with a window


class SegmentPlan(NamedTuple):
    """The groups of a micro-batch. Made on the host, so that no layer waits for a GPU to learn the lengths."""

    groups: list[SegmentGroup]  # by length, ascending
    # int64 [t]: from the groups' rows, one group after the other, to the positions here; None: they are in order
    order: torch.Tensor | None

    @classmethod
    def of(cls, lengths: np.ndarray, cp_rank: int, cp_size: int, device: torch.device, window: int = 0) -> SegmentPlan:
        """lengths: int64 [segments], in positions of all context-parallel ranks together. `window`: of the model."""

        def on_device(array: np.ndarray) -> torch.Tensor:
            return to_device(torch.from_numpy(array), device)

        def masks(length: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
            reached = 0 < window < length  # the window
            if cp_size == 1 and not reached:
                return None, None
            rows, keys = context_positions(length, cp_size)[cp_rank][:, None], np.arange(length)
            causal = rows >= keys
            mask = None if cp_size == 1 else on_device(causal)
            return mask, on_device(causal & (rows - window < keys)) if reached else mask

        if cp_size == 1 and (lengths == lengths[0]).all():
            return cls([SegmentGroup(int(lengths[0]), None, None, *masks(int(lengths[0])))], None)
        starts, here = np.cumsum(lengths) - lengths, int(lengths.sum()) // cp_size
        groups, places = [], []
        for length in np.unique(lengths).tolist():
            held = context_positions(length, cp_size)
            share = length // cp_size
            first = starts[lengths == length][:, None] // cp_size
            rows = (first + np.arange(share)).flatten()
            gathered = held.flatten().argsort()
            sources = (first + (gathered // share) * here + gathered % share).flatten()
            groups.append(SegmentGroup(length, on_device(rows), on_device(sources), *masks(length)))
            places.append(rows)
        return cls(groups, on_device(np.concatenate(places).argsort()))


@dataclass
class Segments(PackedSeqParams):
    """What Megatron's layers need to know about packed sequences, and what PackedAttention needs, for all layers."""

    local_rotary: torch.Tensor | None = None  # as `rotary`, of layers with a window if they have RoPE of their own
    plan: SegmentPlan | None = None
    rotary: torch.Tensor | None = None  # float32 [2, t, d / 2] (`rotary_table`)
    routing: Routing | None = None  # of a mixture of experts


class PackedAttention(MegatronModule):
    """Causal attention within each segment of a packed (thd) micro-batch, on any device, without TransformerEngine: one
    call where torch has one for packed sequences, else one for all segments of equal length. The window of a layer is
    that of Megatron's `window_size` and `window_attn_skip_freq`. With Megatron's `softmax_type: learnable` it has
    attention sinks: a learnt logit of each head, `softmax_offset` [heads/tp], beside the scores of every query.

    q [t, heads/tp, d], k [t, kv heads/tp, d], v [t, kv heads/tp, d'] -> [t, heads/tp * d']; the segments are
    those of `packed_seq_params` (`Segments`). Context-parallel ranks gather each other's keys and values.
    """

    sharded_state_dict = DotProductAttention.sharded_state_dict  # of `softmax_offset`

    def __init__(
        self, config, layer_number, softmax_scale=None, k_channels=None, v_channels=None, pg_collection=None, **_
    ):
        super().__init__(config=config)
        assert config.attention_dropout == 0.0, "attention dropout is not supported by PackedAttention"
        width = k_channels or config.kv_channels
        self.scale = softmax_scale or 1.0 / math.sqrt(width)
        self.cp, self.tp_group = pg_collection.cp, pg_collection.tp
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size if windowed else (-1, 0)  # tokens before and after that a query sees
        self.softmax_offset = None
        if config.softmax_type != "vanilla":
            assert config.softmax_type == "learnable", f"PackedAttention has no softmax_type {config.softmax_type}"
            heads = config.num_attention_heads // self.tp_group.size()
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        # torch's own kernel for packed sequences: 16-bit types on a GPU, and it pads no head
        half = config.params_dtype != torch.float32
        small = width <= 256 and width % 8 == 0 and k_channels == v_channels
        self.at_once = torch.cuda.is_available() and varlen.AT_ONCE and half and small and self.cp.size() == 1

    def forward(self, q, k, v, attention_mask, *, packed_seq_params, **_) -> torch.Tensor:
        if self.at_once:
            bounds = packed_seq_params.cu_seqlens_q, packed_seq_params.max_seqlen_q
            v = v.contiguous()  # saved as a view it would keep queries, keys and values before RoPE
            return varlen.attend(q, k, v, bounds, self.scale, self.window, self.softmax_offset).flatten(1)
        if self.cp.size() > 1:
            both = tensor_parallel.gather_from_sequence_parallel_region(
                torch.cat([k, v], dim=-1), tensor_parallel_output_grad=True, group=self.cp
            )
            k, v = both.split(k.shape[-1], dim=-1)
        grouped = q.shape[1] != k.shape[1]
        outputs = []
        plan = packed_seq_params.plan
        for length, rows, sources, mask, local_mask in plan.groups:
            mask = mask if self.window[0] < 0 else local_mask
            # [t, heads, d] -> [segments, heads, length, d]
            same = [
                (x.contiguous() if at is None else x[at]).view(-1, size, *x.shape[1:]).transpose(1, 2)
                for x, at, size in ((q, rows, length // self.cp.size()), (k, sources, length), (v, sources, length))
            ]
            if self.softmax_offset is not None:  # a key of zeros before the others, whose score is the sink
                same[1:] = (F.pad(x, (0, 0, 1, 0)) for x in same[1:])
                mask = self._scores(mask, length)
            attended = F.scaled_dot_product_attention(
                *same, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=grouped
            )
            outputs.append(attended.transpose(1, 2).flatten(0, 1))
        return (outputs[0] if plan.order is None else torch.cat(outputs)[plan.order]).flatten(1)

    def _scores(self, mask: torch.Tensor | None, length: int) -> torch.Tensor:
        """[heads, rows, 1 + length]: what is added to the scores of the sink's key and of the others."""
        if mask is None:
            mask = self.softmax_offset.new_ones(length, length, dtype=torch.bool).tril()
        others = self.softmax_offset.new_zeros(mask.shape).masked_fill(~mask, -math.inf)
        sinks = self.softmax_offset[:, None, None].expand(-1, len(mask), 1)
        return torch.cat([sinks, others.expand(len(sinks), -1, -1)], dim=-1)
