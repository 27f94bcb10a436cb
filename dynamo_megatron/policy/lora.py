"""LoRA on the policy's ranks: adapters beside frozen tensor-parallel linears, in every layout.

Of a column-parallel linear `a` is whole on every tensor-parallel rank and `b` is cut as the linear's rows; of a
row-parallel one `a` is cut as its columns and `b` is whole. A product with a cut matrix is summed over the ranks
between the two, where it has `rank` columns and not the width of a layer. With sequence parallelism a rank multiplies
its own tokens with the whole matrix, and Megatron adds up that matrix's gradient.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from dynamo_megatron.config import LoraConfig
from dynamo_megatron.models.adapters import adapted_linears, is_adapter, merged
from dynamo_megatron.runtime.seeds import derived_seed

if TYPE_CHECKING:
    from dynamo_megatron.policy.model import PolicyModel


class Adapter(torch.nn.Module):
    """Of one linear, whose submodule it is: called with the linear's input and output, returns their sum with the
    adapter's output. Begins with b = 0, and a as in `peft`: uniform in +-1 / sqrt(in), the same in every layout."""

    def __init__(self, linear: torch.nn.Module, lora: LoraConfig, seed: int):
        super().__init__()
        self.column = isinstance(linear, ColumnParallelLinear)
        self.scale, self.on = lora.alpha / lora.rank, True
        self.group, self.sequence_parallel = linear.tp_group, linear.sequence_parallel
        weight, width = linear.weight, linear.input_size
        whole = torch.rand(lora.rank, width, generator=torch.Generator().manual_seed(seed))
        whole = (2 * whole - 1) / math.sqrt(width)
        if not self.column:
            whole = whole.chunk(self.group.size(), dim=1)[self.group.rank()]
        self.a = torch.nn.Parameter(whole.to(weight.device, weight.dtype, copy=True).contiguous())
        self.b = torch.nn.Parameter(weight.new_zeros(weight.shape[0], lora.rank))
        cut, replicated = (self.b, self.a) if self.column else (self.a, self.b)
        set_tensor_model_parallel_attributes(cut, True, 0 if self.column else 1, 1)
        replicated.sequence_parallel = self.sequence_parallel

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """On several tensor-parallel ranks."""
        low, group = F.linear(x, self.a), self.group
        if self.column and self.sequence_parallel:
            low = tensor_parallel.gather_from_sequence_parallel_region(
                low, tensor_parallel_output_grad=True, group=group
            )
        elif self.column:
            low = tensor_parallel.copy_to_tensor_model_parallel_region(low, group=group)
        elif self.sequence_parallel:
            low = tensor_parallel.reduce_scatter_to_sequence_parallel_region(low, group=group)
        else:
            low = tensor_parallel.reduce_from_tensor_model_parallel_region(low, group=group)
        if not y.is_cuda and y.dtype != torch.float32:  # a product in bfloat16: policy/backend.py
            return torch.add(y, F.linear(low, self.b), alpha=self.scale)
        return torch.addmm(y.flatten(0, -2), low.flatten(0, -2), self.b.t(), alpha=self.scale).view_as(y)

    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """This rank's shard of the weight with the adapter in it."""
        return merged(weight, self.a.detach(), self.b.detach(), self.scale)


def _add(linear: torch.nn.Module, given: tuple, output: tuple) -> tuple:
    """Forward hook of a linear that is cut over tensor-parallel ranks."""
    result, bias = output
    return (linear.adapter(given[0], result) if linear.adapter.on else result), bias


def add_adapters(chunks: Sequence[PolicyModel], lora: LoraConfig, seed: int) -> None:
    """Freezes all parameters and adds the adapters. To be called once the weights are loaded, and before the chunks are
    wrapped: what is frozen has neither gradient nor optimizer state."""
    for chunk in chunks:
        chunk.requires_grad_(False)
        for number, layer in enumerate(chunk.decoder.layers, chunk.layer_offset):
            for name in adapted_linears(lora):
                linear = layer.get_submodule(name)
                linear.adapter = Adapter(linear, lora, derived_seed(seed, "adapter", f"{number}.{name}"))
                if linear.tp_group.size() > 1:  # else its `forward` knows of adapters: policy/model.py
                    linear.register_forward_hook(_add)
        if chunk.pre_process and chunk.config.recompute_granularity == "full":
            # A recomputed layer gives its parameters gradients only if its input needs one.
            chunk.embedding.register_forward_hook(lambda _, __, output: output.requires_grad_(torch.is_grad_enabled()))


def base_parameters(chunks: Sequence[PolicyModel]) -> list[torch.nn.Parameter]:
    """All parameters but the adapters'."""
    return [p for chunk in chunks for name, p in chunk.named_parameters() if not is_adapter(name)]


@contextlib.contextmanager
def without_adapters(chunks: Sequence[PolicyModel]) -> Iterator[None]:
    """Inside, the chunks compute what the base model does."""
    adapters = [adapter for chunk in chunks for adapter in chunk.adapters.values()]
    for adapter in adapters:
        adapter.on = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.on = True


def sharded_adapters(chunk: PolicyModel, metadata: dict) -> ShardedStateDict:
    """Of the chunk's adapters, as Megatron stores a linear's weights: stacked over the layers of the whole model."""
    found: ShardedStateDict = {}
    for number, layer in enumerate(chunk.decoder.layers):
        offsets = [(0, number + chunk.layer_offset, chunk.config.num_layers)]
        for name, adapter in layer.named_modules():
            if not isinstance(adapter, Adapter):
                continue
            parts = make_sharded_tensors_for_checkpoint(
                adapter.state_dict(prefix="", keep_vars=True),
                f"decoder.layers.{name}.",
                {"b": 0} if adapter.column else {"a": 1},
                offsets,
                tp_group=adapter.group,
                dp_cp_group=metadata["dp_cp_group"],
            )
            for key, part in parts.items():
                if name == "mlp.linear_fc1.adapter" and key.endswith(".b"):  # gate and up, each cut over the ranks
                    part = apply_swiglu_sharded_factory(part, offsets)
                found[key.replace("decoder.layers.", f"decoder.layers.{number}.", 1)] = part
    return found
