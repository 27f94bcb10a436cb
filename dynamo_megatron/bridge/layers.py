"""Layers of torch under the names, and with the arguments, of megatron-core's classes of TransformerEngine layers."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint


def _sharded(module, axes: dict[str, int], prefix: str, offsets: tuple, metadata, group=None) -> dict:
    values = module if isinstance(module, dict) else module.state_dict(prefix="", keep_vars=True)
    groups = {"tp_group": group or parallel_state.get_tensor_model_parallel_group()}
    return make_sharded_tensors_for_checkpoint(
        values, prefix, axes, offsets, **groups, dp_cp_group=metadata["dp_cp_group"]
    )


def _norm_weight(size: int, config) -> torch.nn.Parameter:
    assert config.normalization == "RMSNorm", f"{config.normalization} has no stand-in"
    weight = torch.nn.Parameter(torch.empty(size, dtype=config.params_dtype))
    weight.sequence_parallel = config.sequence_parallel
    return weight


def _normalize(x: torch.Tensor, weight: torch.Tensor, config, eps: float) -> torch.Tensor:
    weight = weight.float() + 1 if config.layernorm_zero_centered_gamma else weight.float()
    return (F.rms_norm(x.float(), weight.shape, None, eps) * weight).type_as(x)


class TENorm(torch.nn.Module):
    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__()
        self.config, self.eps, self.weight = config, eps, _norm_weight(hidden_size, config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _normalize(x, self.weight, self.config, self.eps)


class TELinear(torch.nn.Module):
    """Not cut: every tensor-parallel rank has all of it."""

    parallel_mode = None

    def __init__(self, input_size, output_size, *, parallel_mode, config, bias, **_):
        super().__init__()
        assert parallel_mode in (None, "duplicated") and not bias
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        self.weight.sequence_parallel, self.weight.tensor_model_parallel = config.sequence_parallel, False

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return F.linear(x, self.weight), None

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None) -> dict:
        return _sharded(self, {}, prefix, sharded_offsets, metadata)


TEColumnParallelLinear = type("TEColumnParallelLinear", (ColumnParallelLinear,), {})
TERowParallelLinear = type("TERowParallelLinear", (RowParallelLinear,), {})


class TELayerNormColumnParallelLinear(ColumnParallelLinear):
    def __init__(self, input_size, output_size, *, config, **options):
        super().__init__(input_size, output_size, config=config, **options)
        self.layer_norm_weight = _norm_weight(input_size, config)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return super().forward(_normalize(x, self.layer_norm_weight, self.config, self.config.layernorm_epsilon))

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None) -> dict:
        return _sharded(self, {"weight": 0, "bias": 0}, prefix, sharded_offsets, metadata)


class _GroupedLinear(torch.nn.Module):
    """The experts of this rank, each of them whole."""

    def __init__(self, num_gemms, input_size, output_size, *, config, bias, skip_bias_add, pg_collection, **_):
        super().__init__()
        assert pg_collection.expt_tp.size() == 1, "experts are not cut"
        self.experts, self.bias, self.skip_bias_add, self.groups = range(num_gemms), bias, skip_bias_add, pg_collection
        for e in self.experts:
            weight = torch.empty(output_size, input_size, dtype=config.params_dtype)
            self.register_parameter(f"weight{e}", torch.nn.Parameter(weight))
            if bias:
                self.register_parameter(f"bias{e}", torch.nn.Parameter(weight.new_empty(output_size)))

    def forward(self, x: torch.Tensor, m_splits: list[int]) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        biases = [getattr(self, f"bias{e}", None) for e in self.experts]
        parts = zip(self.experts, x.split([int(n) for n in m_splits]), strict=True)
        outputs = [
            F.linear(part, getattr(self, f"weight{e}"), None if self.skip_bias_add else biases[e]) for e, part in parts
        ]
        return torch.cat(outputs), biases if self.bias and self.skip_bias_add else None

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None) -> dict:
        """By the names that experts have when they are not grouped, as TransformerEngine's."""
        result, here = {}, len(self.experts)
        kinds = ("weight", "bias") if self.bias else ("weight",)
        for e in self.experts:
            place = (len(sharded_offsets), self.groups.ep.rank() * here + e, self.groups.ep.size() * here)
            values = {f"{e}.{kind}": getattr(self, f"{kind}{e}") for kind in kinds}
            sharded = _sharded(values, {}, "", (*sharded_offsets, place), metadata, self.groups.expt_tp)
            replace_prefix_for_sharding(sharded, f"{e}.", prefix)
            for tensor in sharded.values():
                tensor.replica_id = (*tensor.replica_id[:2], self.groups.expt_dp.rank())
            result |= {f"{prefix}{kind}{e}": sharded[f"{e}.{kind}"] for kind in kinds}
        return result


TEColumnParallelGroupedLinear = type("TEColumnParallelGroupedLinear", (_GroupedLinear,), {})
TERowParallelGroupedLinear = type("TERowParallelGroupedLinear", (_GroupedLinear,), {})


class TEDotProductAttention(torch.nn.Module):
    """Causal attention of packed sequences, with a window and with sinks: query [t, heads, d] -> [t, heads * d]."""

    def __init__(self, config, layer_number, *_, softmax_scale=None, k_channels=None, pg_collection=None, **__):
        super().__init__()
        assert config.attention_dropout == 0.0 and config.context_parallel_size == 1
        self.scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)
        self.window = math.inf  # keys before a query's own that it sees
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            self.window = config.window_size[0]
        self.softmax_offset = None
        assert config.softmax_type in ("vanilla", "learnable"), f"softmax_type {config.softmax_type} has no stand-in"
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // pg_collection.tp.size()
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, *, packed_seq_params, **_):
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        packed = (x.reshape(x.shape[0], *x.shape[-2:]).split(lengths) for x in (query, key, value))
        return torch.cat([self._attend(*segment) for segment in zip(*packed, strict=True)])

    def _attend(self, query, key, value) -> torch.Tensor:
        length, heads, _ = query.shape
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        k, v = (x.repeat_interleave(heads // x.shape[0], dim=0) for x in (k, v))
        distance = torch.arange(length, device=q.device)[:, None] - torch.arange(length, device=q.device)
        hidden = (distance < 0) | (distance > self.window)
        scores = (q @ k.transpose(1, 2) * self.scale).float().masked_fill(hidden, -math.inf)
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
    for part in x.split(cu_seqlens.diff().tolist(), dim=1):
        padded = F.pad(part.transpose(1, 2), (weight.shape[1] - 1, 0))
        parts.append(F.silu(F.conv1d(padded, weight[:, None], bias, groups=len(weight))).transpose(1, 2))
    return torch.cat(parts, dim=1), None


def chunk_gated_delta_rule(q, k, v, *, g, beta, cu_seqlens=None, **_) -> tuple[torch.Tensor, None]:
    """[b, s, heads, d]: of each sequence for itself, as FLA's."""
    from megatron.core.ssm.gated_delta_net.common import torch_chunk_gated_delta_rule

    lengths = cu_seqlens.diff().tolist()
    parts = zip(*(x.split(lengths, dim=1) for x in (q, k, v, g, beta)), strict=True)
    outputs = [torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta)[0] for q, k, v, g, beta in parts]
    return torch.cat(outputs, dim=1), None


def unit_norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


STAND_INS = {name: layer for name, layer in globals().items() if name.startswith("TE")}
