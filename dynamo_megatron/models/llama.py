"""Llama and models that compute the same (SmolLM2; Mistral without its window): no biases, no q/k norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamo_megatron.errors import InputError
from dynamo_megatron.models.config_fields import flag
from dynamo_megatron.models.spec import DENSE_LAYER, ModelSpec, decoder_spec


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Raises ValueError naming the field that cannot be mapped."""
    if flag(config, "mlp_bias"):
        raise InputError("mlp_bias: true is not supported")
    if config.get("model_type") == "mistral":
        for key in ("num_key_value_heads", "sliding_window"):
            if key not in config:
                raise InputError(f"{key}: missing, and what that means differs between mistral and llama; give it")
        if config["sliding_window"] is not None:  # transformers' Mistral applies it whatever layer_types has
            raise InputError("sliding_window: attention other than full attention in every layer is not supported")
    architectures = ("LlamaForCausalLM", "MistralForCausalLM")
    return decoder_spec(config, "llama", layer_names=DENSE_LAYER, architectures=architectures, fields=("mlp_bias",))
