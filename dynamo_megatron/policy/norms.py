"""Norms and residual additions of the policy's layers, beside Megatron's own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last dimension in float32, rounded once; allowed under sequence parallelism. With
    the config's `layernorm_zero_centered_gamma` it multiplies by 1 + weight.

    The mark on the weight makes Megatron all-reduce its gradient over the tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__()
        self.eps, self.zero_centered = eps, config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, eps = self.weight, self.eps
        if self.zero_centered:  # 1 + weight would lose bits in 16
            return F.rms_norm(x.float(), weight.shape, 1 + weight.float(), eps).to(x.dtype)
        if x.is_cuda or x.dtype == torch.float32:  # one kernel, which computes in float32
            # Keys are a view: saved as such they would keep queries, keys and values.
            return F.rms_norm(x.contiguous(), weight.shape, weight, eps)
        return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


class WideNorm(torch.nn.Module):
    """RMSNorm over all heads of queries or keys together, each rank holding `heads` of the `heads` * tp.

    [t, 1, heads, d] -> the same. `group` has to be set: the tensor-parallel ranks, which add up their squares.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, heads: int):
        super().__init__()
        self.eps, self.group = eps, None
        self.scales = torch.nn.Parameter(torch.ones(heads * hidden_size, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.scales, True, 0, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(-2).float()
        own = copy_to_tensor_model_parallel_region(flat.square().sum(-1, keepdim=True), group=self.group)
        squares = reduce_from_tensor_model_parallel_region(own, group=self.group)
        mean = squares / (flat.shape[-1] * self.group.size())
        return (flat * torch.rsqrt(mean + self.eps) * self.scales.float()).to(x.dtype).view_as(x)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None) -> dict:
        state, groups = self.state_dict(keep_vars=True), {"dp_cp_group": metadata["dp_cp_group"]}
        return make_sharded_tensors_for_checkpoint(
            state, prefix, {"scales": 0}, sharded_offsets, tp_group=self.group, **groups
        )


class ResidualAdd(torch.nn.Module):
    """In place of Megatron's bias, dropout and addition: the output of attention or MLP, normalised (`norm`) and
    scaled, is added to the residual."""

    def __init__(self, config: TransformerConfig, norm: bool, scale: float):
        super().__init__()
        self.scale = scale
        self.norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon) if norm else None

    def __call__(self, training: bool, fused: bool):
        return self.add

    def add(self, output: tuple[torch.Tensor, None], residual: torch.Tensor, dropout: float) -> torch.Tensor:
        x = output[0] if self.norm is None else self.norm(output[0])
        return torch.add(residual, x, alpha=self.scale)
