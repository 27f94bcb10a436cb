"""A Hugging Face config.json against what Megatron builds the model from, field by field.

Compared are config.json, read once more and not through the ModelSpec, with the TransformerConfig and with GPTModel's
other arguments, both as `build_chunks` gives them to Megatron: a field that the family's file or the policy mistook
shows. What config.json says by `model_type` alone, biases and q/k norms, is compared with the family's tensors, which
are compared with the folder's. No model is built: tests/models/test_published.py builds it for every family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F

from dynamo_megatron.config import Config
from dynamo_megatron.models import ModelSpec
from dynamo_megatron.policy.model import model_arguments, transformer_config

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
    "mlp_bias": "add_bias_linear",
}
# config.json's field -> GPTModel's argument
ARGUMENTS = {
    "max_position_embeddings": "max_sequence_length",
    "tie_word_embeddings": "share_embeddings_and_output_weights",
    "rope_theta": "rotary_base",
}


def config_differences(config: Mapping[str, Any], spec: ModelSpec) -> list[str]:
    """What config.json says and Megatron would build otherwise, "field: a, Megatron: b"; fields it lacks have its
    family's default and are not compared."""
    placeholder = Config(model={"path": "none"}, data={"source": "none"}, output_dir="none")
    megatron, arguments = transformer_config(spec, placeholder), model_arguments(spec, placeholder.parallel.tp)
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    config = {**config, **rope, "rope_type": rope.get("rope_type", rope.get("type", "default"))}
    built = {key: getattr(megatron, field) for key, field in FIELDS.items()}
    built |= {key: arguments[argument] for key, argument in ARGUMENTS.items()}
    built |= {"rope_type": "default", **dict(spec.rope_scaling)}
    built["hidden_act"] = "silu" if megatron.activation_func is F.silu and megatron.gated_linear_unit else "another"
    if arguments["vocab_size"] - config["vocab_size"] not in range(16):  # less than one more multiple of 16
        built["vocab_size"] = arguments["vocab_size"]
    if spec.num_experts:
        config["norm_topk_prob"] = bool(config.get("norm_topk_prob"))
        built["norm_topk_prob"] = not megatron.moe_router_pre_softmax
    for what, parameter, field in (
        ("biases of q, k, v", "self_attention.linear_qkv.bias", "add_qkv_bias"),
        ("norms of q, k", "self_attention.q_layernorm.weight", "qk_layernorm"),
    ):
        config[what], built[what] = parameter in spec.layer_names, getattr(megatron, field)
    return [
        f"{key}: {config[key]}, Megatron: {value}"
        for key, value in built.items()
        if config.get(key) is not None and config[key] != value
    ]
