"""Qwen3, dense: RMSNorm on every head of q and k, a head size of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamo_megatron.models.spec import DENSE_LAYER, ModelSpec, decoder_spec

QWEN3_LAYER = {
    **DENSE_LAYER,
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
}


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Raises ValueError naming the field that cannot be mapped."""
    return decoder_spec(
        config, "qwen3", layer_names=QWEN3_LAYER, architectures=("Qwen3ForCausalLM",), qk_norm=True, head_dim=128
    )
