"""Layers of torch under the names, and with the arguments, of megatron-core's classes of TransformerEngine layers, and
in place of FLA's functions for linear attention. Experts are Megatron's own SequentialMLP, one after the other."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net.common import torch_chunk_gated_delta_rule
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from dynamo_megatron.policy.attention import PackedAttention
from dynamo_megatron.policy.norms import RMSNorm


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


class TELayerNormColumnParallelLinear(ColumnParallelLinear):
    def __init__(self, input_size, output_size, *, config, **options):
        super().__init__(input_size, output_size, config=config, **options)
        self.norm = [RMSNorm(config, input_size, config.layernorm_epsilon)]  # no submodule: its weight is named here
        self.layer_norm_weight = self.norm[0].weight

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return super().forward(self.norm[0](x))


class TERowParallelLinear(RowParallelLinear):
    def __init__(self, *sizes, is_expert=False, **options):
        super().__init__(*sizes, is_expert=is_expert, **options)
        self.explicit_expert_comm = is_expert  # nothing to sum: an expert is whole on its rank


TE_LAYERS = {
    "TENorm": RMSNorm,
    "LayerNormImpl": RMSNorm,  # chosen when Megatron was imported
    "TELinear": TELinear,
    "TEColumnParallelLinear": ColumnParallelLinear,
    "TERowParallelLinear": TERowParallelLinear,
    "TELayerNormColumnParallelLinear": TELayerNormColumnParallelLinear,
    "TEDotProductAttention": PackedAttention,
}


def causal_conv1d(x, weight, bias, activation, cu_seqlens, **_) -> tuple[torch.Tensor, None]:
    """x [1, s, d], weight [d, w]"""
    assert activation in ("silu", "swish")
    parts = [F.pad(part.mT, (weight.shape[1] - 1, 0)) for part in x.split(cu_seqlens.diff().tolist(), 1)]
    return torch.cat([F.silu(F.conv1d(part, weight[:, None], bias, groups=len(weight))).mT for part in parts], 1), None


def chunk_gated_delta_rule(q, k, v, *, g, beta, cu_seqlens, **_) -> tuple[torch.Tensor, None]:
    """[1, s, heads, d]"""
    parts = zip(*(x.split(cu_seqlens.diff().tolist(), 1) for x in (q, k, v, g, beta)), strict=True)
    return torch.cat([torch_chunk_gated_delta_rule(*part)[0] for part in parts], 1), None
