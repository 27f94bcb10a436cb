"""Llama 3.x and what shares its shape (SmolLM2): no biases, no q/k norm, perhaps Llama 3's RoPE scaling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamo_megatron.models.spec import DENSE_LAYER, ModelSpec, decoder_spec, flag


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Raises ValueError naming the field that cannot be mapped."""
    for key in ("attention_bias", "mlp_bias"):
        if flag(config, key):
            raise ValueError(f"{key}: true is not supported")
    return decoder_spec(config, "llama", layer_names=DENSE_LAYER)
