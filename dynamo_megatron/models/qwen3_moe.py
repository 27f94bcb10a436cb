"""Qwen3 mixture of experts (30B-A3B, 235B-A22B): Qwen3's attention, every MLP replaced by routed experts.

The router is a linear layer whose softmax picks `num_experts_per_tok` experts per token; there are no shared experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dynamo_megatron.errors import InputError
from dynamo_megatron.models.config_fields import flag, integer
from dynamo_megatron.models.qwen3 import QWEN3_LAYER
from dynamo_megatron.models.spec import ModelSpec, decoder_spec

FIELDS = """
    decoder_sparse_step mlp_only_layers moe_intermediate_size norm_topk_prob num_experts num_experts_per_tok
    num_local_experts
"""
ATTENTION = {name: parts for name, parts in QWEN3_LAYER.items() if not name.startswith("mlp.")}


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Raises ValueError naming the field that cannot be mapped: anything but routed experts in every layer."""
    if integer(config, "decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
        key = "mlp_only_layers" if config.get("mlp_only_layers") else "decoder_sparse_step"
        raise InputError(f"{key}: {config[key]!r} is not supported; every layer must be a mixture of experts")
    if flag(config, "use_sliding_window") and config.get("sliding_window", 4096) is not None:  # in every layer
        raise InputError("sliding_window: attention other than full attention in every layer is not supported")
    # transformers 5 writes num_local_experts, older ones and the published files num_experts
    experts = integer(config, "num_local_experts" if config.get("num_experts") is None else "num_experts")
    topk = integer(config, "num_experts_per_tok")
    if topk == 1 and flag(config, "norm_topk_prob"):
        raise InputError("norm_topk_prob: true with num_experts_per_tok 1 leaves the router no gradient; not supported")
    spec = decoder_spec(
        config,
        "qwen3_moe",
        layer_names=_layer_names(experts),
        architectures=("Qwen3MoeForCausalLM",),
        fields=FIELDS.split(),
        qk_norm=True,
    )
    return replace(
        spec,
        num_experts=experts,
        router_topk=topk,
        moe_ffn_hidden_size=integer(config, "moe_intermediate_size"),
        norm_topk_prob=flag(config, "norm_topk_prob"),
    )


def _layer_names(experts: int) -> dict[str, tuple[str, ...]]:
    names = {**ATTENTION, "mlp.router.weight": ("mlp.gate.weight",)}
    for e in range(experts):
        here, there = f"mlp.experts.local_experts.{e}", f"mlp.experts.{e}"
        names[f"{here}.linear_fc1.weight"] = (f"{there}.gate_proj.weight", f"{there}.up_proj.weight")
        names[f"{here}.linear_fc2.weight"] = (f"{there}.down_proj.weight",)
    return names
