"""Qwen2 and Qwen2.5, dense: q, k and v have a bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamo_megatron.models.spec import DENSE_LAYER, ModelSpec, decoder_spec

QWEN2_LAYER = {
    **DENSE_LAYER,
    "self_attention.linear_qkv.bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
}


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Raises ValueError naming the field that cannot be mapped."""
    return decoder_spec(config, "qwen2", layer_names=QWEN2_LAYER, architectures=("Qwen2ForCausalLM",), qkv_bias=True)
