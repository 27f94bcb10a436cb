"""Layers of torch under the names, and with the arguments, of megatron-core's classes of TransformerEngine layers."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from megatron.core.utils import get_pg_size

__all__ = [
    "TEColumnParallelGroupedLinear",
    "TEColumnParallelLinear",
    "TEDotProductAttention",
    "TELayerNormColumnParallelLinear",
    "TELinear",
    "TENorm",
    "TERowParallelGroupedLinear",
    "TERowParallelLinear",
]


def _sharded(module: torch.nn.Module, axes: dict[str, int], prefix, sharded_offsets, metadata) -> dict:
    return make_sharded_tensors_for_checkpoint(
        module.state_dict(prefix="", keep_vars=True),
        prefix,
        axes,
        sharded_offsets,
        tp_group=module.tp_group,
        dp_cp_group=metadata["dp_cp_group"],
    )


def _normalize(x, weight, bias, config, eps: float) -> torch.Tensor:
    if config.layernorm_zero_centered_gamma:
        weight = weight + 1
    if config.normalization == "LayerNorm":
        return F.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), eps).type_as(x)
    return (F.rms_norm(x.float(), weight.shape, None, eps) * weight.float()).type_as(x)


class _Norm(torch.nn.Module):
    def __init__(self, config, hidden_size: int, eps: float):
        super().__init__()
        self.config, self.eps = config, eps
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        self.bias = None
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.empty_like(self.weight))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _normalize(x, self.weight, self.bias, self.config, self.eps)


class TENorm:
    def __new__(cls, config, hidden_size: int, eps: float = 1e-5, has_residual: bool = False) -> _Norm:
        assert config.normalization in ("LayerNorm", "RMSNorm")
        return _Norm(config, hidden_size, eps)


class TELinear(torch.nn.Module):
    """Not cut: every tensor-parallel rank has all of it."""

    def __init__(self, input_size, output_size, *, parallel_mode, config, init_method, bias, skip_bias_add, **_):
        super().__init__()
        assert parallel_mode in (None, "duplicated") and not bias
        self.config, self.parallel_mode = config, None
        self.tp_group = None
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel
        self.weight.tensor_model_parallel = False

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return F.linear(x, self.weight), None

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None) -> dict:
        from megatron.core.parallel_state import get_tensor_model_parallel_group

        self.tp_group = get_tensor_model_parallel_group()
        return _sharded(self, {}, prefix, sharded_offsets, metadata)


class TEColumnParallelLinear(ColumnParallelLinear):
    def __init__(self, *args, name=None, **options):
        super().__init__(*args, **options)


class TERowParallelLinear(RowParallelLinear):
    def __init__(self, *args, name=None, **options):
        super().__init__(*args, **options)


class TELayerNormColumnParallelLinear(ColumnParallelLinear):
    def __init__(self, input_size, output_size, *, config, name=None, **options):
        super().__init__(input_size, output_size, config=config, **options)
        self.layer_norm_weight = torch.nn.Parameter(torch.empty(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel
        self.layer_norm_bias = None
        if config.normalization == "LayerNorm":
            self.layer_norm_bias = torch.nn.Parameter(torch.empty_like(self.layer_norm_weight))
            self.layer_norm_bias.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        norm = self.layer_norm_weight, self.layer_norm_bias, self.config, self.config.layernorm_epsilon
        return super().forward(_normalize(x, *norm))

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None) -> dict:
        return _sharded(self, {"weight": 0, "bias": 0}, prefix, sharded_offsets, metadata)


class _GroupedLinear(torch.nn.Module):
    """The experts of this rank, each of them whole."""

    def __init__(self, num_gemms, input_size, output_size, *, config, bias, skip_bias_add, pg_collection, **_):
        super().__init__()
        assert get_pg_size(pg_collection.expt_tp) == 1, "experts are not cut"
        self.groups = pg_collection
        self.num_gemms, self.config, self.use_bias, self.skip_bias_add = num_gemms, config, bias, skip_bias_add
        for e in range(num_gemms):
            weight = torch.empty(output_size, input_size, dtype=config.params_dtype)
            self.register_parameter(f"weight{e}", torch.nn.Parameter(weight))
            if bias:
                self.register_parameter(f"bias{e}", torch.nn.Parameter(weight.new_empty(output_size)))
        for parameter in self.parameters():
            parameter.allreduce = False

    def forward(self, x: torch.Tensor, m_splits: list[int]) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        biases = [getattr(self, f"bias{e}") for e in range(self.num_gemms)] if self.use_bias else None
        added = [None] * self.num_gemms if biases is None or self.skip_bias_add else biases
        parts = x.split([int(n) for n in m_splits])
        outputs = [F.linear(part, getattr(self, f"weight{e}"), added[e]) for e, part in enumerate(parts)]
        return torch.cat(outputs), biases if self.skip_bias_add else None

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None) -> dict:
        """By the names that experts have when they are not grouped, as TransformerEngine's."""
        result = {}
        count = self.groups.ep.size() * self.num_gemms
        for e in range(self.num_gemms):
            kinds = ("weight", "bias") if self.use_bias else ("weight",)
            place = (len(sharded_offsets), self.groups.ep.rank() * self.num_gemms + e, count)
            sharded = make_sharded_tensors_for_checkpoint(
                {f"{e}.{kind}": getattr(self, f"{kind}{e}") for kind in kinds},
                "",
                {},
                (*sharded_offsets, place),
                tp_group=self.groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(sharded, f"{e}.", prefix)
            for tensor in sharded.values():
                tensor.replica_id = (*tensor.replica_id[:2], self.groups.expt_dp.rank())
            result |= {f"{prefix}{kind}{e}": sharded[f"{e}.{kind}"] for kind in kinds}
        return result


class TEColumnParallelGroupedLinear(_GroupedLinear):
    pass


class TERowParallelGroupedLinear(_GroupedLinear):
    pass


class TEDotProductAttention(torch.nn.Module):
    """Causal attention, packed (thd) or not (sbhd), with a window and with sinks."""

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        softmax_scale=None,
        k_channels=None,
        v_channels=None,
        pg_collection=None,
        **_,
    ):
        super().__init__()
        assert config.attention_dropout == 0.0 and config.context_parallel_size == 1
        self.config, self.tp_group = config, pg_collection.tp
        self.scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)
        self.window = None  # keys before a query's own that it sees
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            self.window = config.window_size[0]
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // get_pg_size(pg_collection.tp)
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        else:
            assert config.softmax_type == "vanilla"

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, packed_seq_params=None, **_):
        if packed_seq_params is None:  # [s, b, heads, d]
            sequences = [self._attend(*(x[:, b] for x in (query, key, value))) for b in range(query.shape[1])]
            return torch.stack(sequences, dim=1)
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        packed = (x.reshape(x.shape[0], *x.shape[-2:]).split(lengths) for x in (query, key, value))
        return torch.cat([self._attend(*segment) for segment in zip(*packed, strict=True)])

    def _attend(self, query, key, value) -> torch.Tensor:
        """[s, heads, d] -> [s, heads * d] of one sequence."""
        length, heads, _ = query.shape
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        k, v = (x.repeat_interleave(heads // x.shape[0], dim=0) for x in (k, v))
        distance = torch.arange(length, device=q.device)[:, None] - torch.arange(length, device=q.device)
        seen = distance >= 0 if self.window is None else (distance >= 0) & (distance <= self.window)
        scores = (q @ k.transpose(1, 2) * self.scale).float().masked_fill(~seen, -math.inf)
        if self.softmax_offset is not None:
            sinks = self.softmax_offset.float()[:, None, None].expand(-1, length, 1)
            scores = torch.cat([scores, sinks], dim=-1)
        probabilities = scores.softmax(-1)[..., :length].type_as(v)
        return (probabilities @ v).transpose(0, 1).flatten(1)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None) -> dict:
        return _sharded(self, {"softmax_offset": 0}, prefix, sharded_offsets, metadata)


def causal_conv1d(x, weight, bias, activation, cu_seqlens=None, **_) -> tuple[torch.Tensor, None]:
    """x [b, s, d], weight [d, w]: of each sequence for itself, as FLA's."""
    assert activation in ("silu", "swish")
    parts = []
    for part in _sequences(x, cu_seqlens):
        padded = F.pad(part.transpose(1, 2), (weight.shape[1] - 1, 0))
        parts.append(F.silu(F.conv1d(padded, weight[:, None], bias, groups=len(weight))).transpose(1, 2))
    return torch.cat(parts, dim=1), None


def chunk_gated_delta_rule(q, k, v, *, g, beta, cu_seqlens=None, **_) -> tuple[torch.Tensor, None]:
    """[b, s, heads, d]: of each sequence for itself, as FLA's."""
    from megatron.core.ssm.gated_delta_net.common import torch_chunk_gated_delta_rule

    parts = zip(*(_sequences(x, cu_seqlens) for x in (q, k, v, g, beta)), strict=True)
    outputs = [torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta)[0] for q, k, v, g, beta in parts]
    return torch.cat(outputs, dim=1), None


def unit_norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _sequences(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    return (x,) if cu_seqlens is None else x.split(cu_seqlens.diff().tolist(), dim=1)
