"""Low-rank adapters (LoRA, arXiv 2106.09685): which linears have one, its names and shapes, and the merged weight.

The adapter of a linear, `decoder.layers.N.mlp.linear_fc1` say, has the parameters `LINEAR.adapter.a` [rank, in] and
`LINEAR.adapter.b` [out, rank], whose rows have Megatron's order. The linear computes W x + alpha / rank b a x.
"""

from __future__ import annotations

from collections.abc import Iterator

from dynamo_megatron.config import LoraConfig
from dynamo_megatron.errors import InputError
from dynamo_megatron.models.mapping import LAYOUT, huggingface_shapes
from dynamo_megatron.models.spec import ModelSpec
from dynamo_megatron.runtime.late import torch

TARGETS = {
    "attention": ("self_attention.linear_qkv", "self_attention.linear_proj"),
    "mlp": ("mlp.linear_fc1", "mlp.linear_fc2"),
}
ADAPTER = ".adapter."


def adapted_linears(lora: LoraConfig) -> list[str]:
    """The linears of a layer that have an adapter, without `decoder.layers.N.`."""
    return [linear for target, linears in TARGETS.items() if target in lora.targets for linear in linears]


def check_lora(lora: LoraConfig, spec: ModelSpec) -> None:
    """Raises InputError where the model does not have such adapters."""
    if spec.num_experts and "mlp" in lora.targets:
        raise InputError(
            "model.lora.targets: the MLPs of a mixture of experts have no adapters here; set it to [attention]"
        )


def adapted_weights(spec: ModelSpec, lora: LoraConfig) -> Iterator[str]:
    """Yields the Megatron names of the weights that adapters change, of the whole model."""
    for layer in range(spec.num_layers):
        yield from (f"decoder.layers.{layer}.{linear}.weight" for linear in adapted_linears(lora))


def adapter_elements(spec: ModelSpec, lora: LoraConfig, tp: int = 1) -> int:
    """Parameters of a layer's adapters on each of `tp` tensor-parallel ranks: policy/lora.py."""
    shapes, total = huggingface_shapes(spec), 0
    for linear in adapted_linears(lora):
        parts = [shapes[f"model.layers.0.{part}"] for part in spec.layer_names[f"{linear}.weight"]]
        rows, columns = sum(part[0] for part in parts), parts[0][1]
        total += columns // tp + rows if LAYOUT[f"{linear}.weight"] == "row" else columns + rows // tp
    return lora.rank * total


def is_adapter(name: str) -> bool:
    """Whether a Megatron parameter is an adapter's."""
    return ADAPTER in name


def merged(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """weight + scale b a, computed in float32 and rounded once, in the weight's dtype."""
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scale).to(weight.dtype)
