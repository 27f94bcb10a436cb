"""Compares a Hugging Face config.json with the arguments from which Megatron builds the model, field by field.

config.json is read once more, not through the ModelSpec. It is compared with the TransformerConfig and with GPTModel's
other arguments, both as `build_chunks` passes them to Megatron. This finds a field that the family's module or the
policy has misread. RoPE's frequencies and the softmax scale are compared with those that transformers computes from
config.json. Biases and q/k norms, which config.json implies by `model_type` alone, are compared with the family's
tensors, and these with the folder's when it is opened. No model is built here; tests/models/test_published.py builds
one for every family.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dynamo_megatron.config import Config
from dynamo_megatron.errors import InputError
from dynamo_megatron.models import ModelSpec
from dynamo_megatron.policy.model import model_arguments, rotation, transformer_config
from dynamo_megatron.runtime import plain_json

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
}


def config_differences(config: Mapping[str, Any], spec: ModelSpec) -> list[str]:
    """Returns the fields that Megatron would build otherwise than config.json has them, as "field: a, Megatron: b".
    Fields that config.json lacks have the family's default and are not compared."""
    placeholder = Config(model={"path": "none"}, data={"source": "none"}, output_dir="none")
    megatron, arguments = transformer_config(spec, placeholder), model_arguments(spec, placeholder.parallel.tp)
    rope = _rope_differences(config, spec, megatron, arguments["rotary_base"])
    config = dict(config)
    built = {key: getattr(megatron, field) for key, field in FIELDS.items()}
    built |= {key: arguments[argument] for key, argument in ARGUMENTS.items()}
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
    ] + rope


def _rope_differences(
    config: Mapping[str, Any], spec: ModelSpec, megatron: TransformerConfig, rotary_base: float
) -> list[str]:
    theirs = AutoConfig.for_model(**copy.deepcopy(dict(config)))  # it completes the parameters in place
    size = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    kind = theirs.rope_parameters["rope_type"]
    if kind == "default":
        expected, factor = _plain_frequencies(theirs.rope_parameters["rope_theta"], size), 1.0
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[kind](theirs, torch.device("cpu"))
    found = rotation(spec)[0]
    if found is None:
        found = _plain_frequencies(rotary_base, megatron.kv_channels)
    if found.shape != expected.shape:
        return [f"RoPE frequencies: {len(expected)}, Megatron: {len(found)}"]
    differ = []
    deviation = (found / expected).log().abs()
    if deviation[worst := int(deviation.argmax())] > 1e-5:
        differ.append(f"RoPE frequency {worst}: {float(expected[worst]):g}, Megatron: {float(found[worst]):g}")
    scale = factor**2 * size**-0.5
    built = megatron.softmax_scale or megatron.kv_channels**-0.5
    if not math.isclose(scale, built, rel_tol=1e-5):  # transformers writes a rounded attention_factor
        differ.append(f"softmax scale: {scale:g}, Megatron: {built:g}")
    return differ


def _plain_frequencies(theta: float, size: int) -> torch.Tensor:
    return theta ** -(torch.arange(0, size, 2) / size)


def check_config(source: Path, spec: ModelSpec) -> None:
    """Compares config.json, field by field, with what Megatron will build. Raises ValueError naming the fields."""
    config = plain_json.read_object(source / "config.json")
    if differ := config_differences(config, spec):
        raise InputError(f"{source / 'config.json'}: Megatron would build another model: {'; '.join(differ)}")
