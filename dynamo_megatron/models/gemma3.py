"""Gemma 3, text alone (270M, 1B): config.json -> ModelSpec.

Layers with a window and a RoPE base of their own alternate with layers without; norms before and after attention and
MLP; RMSNorm on every head of q and k; GeGLU; an embedding times the square root of its width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dynamo_megatron.errors import InputError
from dynamo_megatron.models.config_fields import integer, number
from dynamo_megatron.models.spec import DENSE_LAYER, ModelSpec, decoder_spec, read_rope, read_windows

LAYER = {
    **DENSE_LAYER,
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
    "self_attn_bda.norm.weight": ("post_attention_layernorm.weight",),
    "pre_mlp_layernorm.weight": ("pre_feedforward_layernorm.weight",),
    "mlp_bda.norm.weight": ("post_feedforward_layernorm.weight",),
}
ACTIVATION = "gelu_pytorch_tanh"
KINDS = ("full_attention", "sliding_attention")
ROPE = ("rope_parameters", "rope_theta", "rope_scaling", "rope_local_base_freq")


def gemma3_text(config: Mapping[str, Any]) -> ModelSpec:
    """Raises ValueError naming the field of config.json that cannot be mapped."""
    if config.get("hidden_activation", ACTIVATION) != ACTIVATION:
        raise InputError(f"hidden_activation: {config['hidden_activation']!r} is not supported, only {ACTIVATION!r}")
    pattern, layers = integer(config, "sliding_window_pattern", 6), integer(config, "num_hidden_layers")
    windows = read_windows(config, [KINDS[(i + 1) % pattern > 0] for i in range(layers)])
    everywhere, local = _ropes(config)
    theta, scaling = read_rope(local, 1)
    spec = decoder_spec(
        {"tie_word_embeddings": True, **everywhere},
        "gemma3_text",
        LAYER,
        ("Gemma3ForCausalLM",),
        ("hidden_activation", "query_pre_attn_scalar", "sliding_window_pattern"),
        head_dim=256,
        activation=ACTIVATION,
        windows=windows,
    )
    if spec.rope_scaling or scaling:  # SGLang ignores it
        raise InputError("rope_scaling: a Gemma 3 with scaled RoPE is not supported")
    return replace(
        spec,
        attention_scale=number(config, "query_pre_attn_scalar", 256.0) ** -0.5,
        embedding_scale=spec.hidden_size**0.5,  # as SGLang has it; transformers rounds it to the weights' dtype
        local_rope_theta=theta if windows else None,
        zero_centered_norms=True,
    )


def _ropes(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """config with RoPE fields of the layers without a window, and those fields of the layers with one. transformers 5
    writes both into rope_parameters, older versions have a field for each."""
    others = {key: value for key, value in config.items() if key not in ROPE}
    both = config.get("rope_parameters")
    if both is None:
        scaling = config.get("rope_scaling")
        old = {"rope_theta": number(config, "rope_theta", 1e6)} | ({"rope_scaling": scaling} if scaling else {})
        return others | old, {"rope_theta": number(config, "rope_local_base_freq", 1e4)}
    sets = [both.get(kind) for kind in KINDS] if isinstance(both, dict) and len(both) == len(KINDS) else []
    if not sets or not all(isinstance(one, dict) and "rope_theta" in one for one in sets):
        raise InputError(f"rope_parameters: {both!r} is not a set with rope_theta for each of {', '.join(KINDS)}")
    for key in ROPE[1:]:
        if config.get(key) is not None:
            raise InputError(f"{key}: given beside rope_parameters, which has one for each kind of layer; remove it")
    return others | {"rope_parameters": sets[0]}, {"rope_parameters": sets[1]}
