"""A Hugging Face config.json against the config Megatron will build from it, field by field.

Read from the file once more, not from the ModelSpec that Megatron's config is made of: a field that the family's file
mistook shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamo_megatron.config import Config
from dynamo_megatron.models import ModelSpec
from dynamo_megatron.policy.model import transformer_config

# config.json's field -> TransformerConfig's
FIELDS = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "rms_norm_eps": "layernorm_epsilon",
    "num_experts": "num_moe_experts",
    "num_local_experts": "num_moe_experts",
    "num_experts_per_tok": "moe_router_topk",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "attention_bias": "add_qkv_bias",
}
# config.json's field -> the ModelSpec's that GPTModel takes as an argument of its own
ARGUMENTS = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_positions",
    "tie_word_embeddings": "tied",
    "rope_theta": "rope_theta",
    "factor": "rope_scaling_factor",
}


def config_differences(config: Mapping[str, Any], spec: ModelSpec) -> list[str]:
    """What config.json says and Megatron would build otherwise, "field: a, Megatron: b"; fields it lacks have its
    family's default and are not compared."""
    placeholder = Config(model={"path": "none"}, data={"source": "none"}, output_dir="none")
    megatron = transformer_config(spec, placeholder)
    config = {**config, **(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    built = {key: getattr(megatron, field) for key, field in FIELDS.items()}
    built |= {key: getattr(spec, field) for key, field in ARGUMENTS.items()}
    if spec.num_experts:
        config["norm_topk_prob"] = bool(config.get("norm_topk_prob"))
        built["norm_topk_prob"] = not megatron.moe_router_pre_softmax
    return [
        f"{key}: {config[key]}, Megatron: {value}"
        for key, value in built.items()
        if config.get(key) is not None and config[key] != value
    ]
