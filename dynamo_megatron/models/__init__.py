"""Models: Hugging Face config -> ModelSpec; names, shapes, and an SGLang server's own layout.

Each family has a function and an entry in FAMILIES. It raises ValueError naming the field of config.json that cannot be
mapped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dynamo_megatron.errors import InputError
from dynamo_megatron.models.bridged import bridged_spec
from dynamo_megatron.models.config_fields import flag, integer, number
from dynamo_megatron.models.gemma3 import gemma3_text
from dynamo_megatron.models.spec import DENSE_LAYER, ModelSpec, decoder_spec, read_windows
from dynamo_megatron.runtime import plain_json
from dynamo_megatron.runtime.plain_text import on_one_line

QWEN2_LAYER = {
    **DENSE_LAYER,
    "self_attention.linear_qkv.bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
}
QWEN3_LAYER = {
    **DENSE_LAYER,
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
}
PHI3_LAYER = {
    **DENSE_LAYER,
    "self_attention.linear_qkv.weight": ("self_attn.qkv_proj.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_up_proj.weight",),
}
GLM4_LAYER = {
    **DENSE_LAYER,
    "self_attn_bda.norm.weight": ("post_self_attn_layernorm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_up_proj.weight",),
    "mlp_bda.norm.weight": ("post_mlp_layernorm.weight",),
}
OLMO2_LAYER = {
    **{name: parts for name, parts in DENSE_LAYER.items() if "layernorm" not in name},
    "self_attention.q_layernorm.scales": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.scales": ("self_attn.k_norm.weight",),
    "self_attn_bda.norm.weight": ("post_attention_layernorm.weight",),
    "mlp_bda.norm.weight": ("post_feedforward_layernorm.weight",),
}
GRANITE_FIELDS = ("mlp_bias", "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
MIXTURE_FIELDS = """
    decoder_sparse_step mlp_only_layers moe_intermediate_size norm_topk_prob num_experts num_experts_per_tok
    num_local_experts
"""
WINDOW = "sliding_window: not supported in this family"
LAYERS = "num_hidden_layers"
OLMO3_THETA = 500000.0


def llama(config: Mapping[str, Any]) -> ModelSpec:
    """Llama and models that compute the same (SmolLM2; Mistral, which may have a window): no biases, no q/k norm."""
    windows = None
    if flag(config, "mlp_bias"):
        raise InputError("mlp_bias: true is not supported")
    if config.get("model_type") == "mistral":
        for key in ("num_key_value_heads", "sliding_window"):
            if key not in config:
                raise InputError(f"{key}: missing, and what that means differs between mistral and llama; give it")
        windows = _everywhere(config)
    architectures = ("LlamaForCausalLM", "MistralForCausalLM")
    return decoder_spec(config, "llama", DENSE_LAYER, architectures, ("mlp_bias",), windows=windows)


def qwen2(config: Mapping[str, Any]) -> ModelSpec:
    """Qwen2 and Qwen2.5, dense: q, k and v have a bias."""
    return decoder_spec(config, "qwen2", QWEN2_LAYER, ("Qwen2ForCausalLM",), windows=_from_a_layer_on(config))


def qwen3(config: Mapping[str, Any]) -> ModelSpec:
    """Qwen3, dense: RMSNorm on every head of q and k, a head size of its own."""
    windows = _from_a_layer_on(config)
    return decoder_spec(config, "qwen3", QWEN3_LAYER, ("Qwen3ForCausalLM",), head_dim=128, windows=windows)


def qwen3_moe(config: Mapping[str, Any]) -> ModelSpec:
    """Qwen3 mixture of experts (30B-A3B, 235B-A22B): Qwen3's attention, every MLP replaced by routed experts. The
    router is a linear layer whose softmax picks `num_experts_per_tok` experts per token; no expert is shared."""
    if integer(config, "decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
        key = "mlp_only_layers" if config.get("mlp_only_layers") else "decoder_sparse_step"
        raise InputError(f"{key}: {config[key]!r} is not supported; every layer must be a mixture of experts")
    windowed = flag(config, "use_sliding_window") and config.get("sliding_window", 4096) is not None  # in every layer
    if windowed or read_windows(config):
        raise InputError(WINDOW)
    # transformers 5 writes num_local_experts, older ones and the published files num_experts
    experts = integer(config, "num_local_experts" if config.get("num_experts") is None else "num_experts")
    topk = integer(config, "num_experts_per_tok")
    if topk == 1 and flag(config, "norm_topk_prob"):
        raise InputError("norm_topk_prob: true with num_experts_per_tok 1 leaves the router no gradient; not supported")
    names = {name: parts for name, parts in QWEN3_LAYER.items() if not name.startswith("mlp.")}
    names["mlp.router.weight"] = ("mlp.gate.weight",)
    for e in range(experts):
        here, there = f"mlp.experts.local_experts.{e}", f"mlp.experts.{e}"
        names[f"{here}.linear_fc1.weight"] = (f"{there}.gate_proj.weight", f"{there}.up_proj.weight")
        names[f"{here}.linear_fc2.weight"] = (f"{there}.down_proj.weight",)
    return replace(
        decoder_spec(config, "qwen3_moe", names, ("Qwen3MoeForCausalLM",), MIXTURE_FIELDS.split(), windows=()),
        num_experts=experts,
        router_topk=topk,
        moe_ffn_hidden_size=integer(config, "moe_intermediate_size"),
        norm_topk_prob=flag(config, "norm_topk_prob"),
    )


def glm4(config: Mapping[str, Any]) -> ModelSpec:
    """GLM-4 of 2025, dense (GLM-4-9B-0414, 32B, Z1): RMSNorm on input and output of attention and MLP, RoPE of
    neighbours in the first half of each head, gate and up in one tensor."""
    for key in ("attention_bias", "rms_norm_eps"):
        _require(config, key)
    biased = flag(config, "attention_bias")
    names = GLM4_LAYER | ({name: QWEN2_LAYER[name] for name in QWEN2_LAYER if name.endswith("bias")} if biased else {})
    plain = {**config, "attention_bias": False}
    spec = decoder_spec(plain, "glm4", names, ("Glm4ForCausalLM",), head_dim=128, rotary_share=0.5)
    if spec.rope_scaling:
        raise InputError("rope_parameters: a GLM-4 with scaled RoPE is not supported")
    return replace(spec, rotary_interleaved=True)


def smollm3(config: Mapping[str, Any]) -> ModelSpec:
    """SmolLM3: Llama, with layers that have no RoPE: those with a 0 in no_rope_layers, else every fourth one or what
    no_rope_layer_interval says."""
    if flag(config, "mlp_bias"):
        raise InputError("mlp_bias: true is not supported")
    if flag(config, "use_sliding_window"):
        raise InputError(WINDOW)
    fields = ("mlp_bias", "no_rope_layer_interval", "no_rope_layers")
    tied = {"tie_word_embeddings": True, **config}  # transformers' default
    spec = decoder_spec(tied, "smollm3", DENSE_LAYER, ("SmolLM3ForCausalLM",), fields)
    if "rope_theta" not in (config.get("rope_parameters") or {}):
        _require(config, "rope_theta")
    if ("rope_type", "yarn") in spec.rope_scaling:  # YaRN's factor would be in the softmax scale of all layers
        raise InputError("rope_type: 'yarn' is not supported in a model that has layers without RoPE")
    interval, turned = integer(config, "no_rope_layer_interval", 4), config.get("no_rope_layers")
    if turned is None:
        turned = [int((layer + 1) % interval != 0) for layer in range(spec.num_layers)]
    if not isinstance(turned, list) or len(turned) < spec.num_layers or any(one not in (0, 1) for one in turned):
        raise InputError(f"no_rope_layers: {turned!r:.80} is not a list of 0 or 1 for each of {spec.num_layers} layers")
    return replace(spec, no_rope_layers=tuple(n for n in range(spec.num_layers) if not turned[n]))


def phi3(config: Mapping[str, Any]) -> ModelSpec:
    """Phi-3 and Phi-4: Llama, with queries, keys and values in one tensor, and gate and up in another."""
    _require(config, "rms_norm_eps")
    fields = ("original_max_position_embeddings",)  # of RoPE "longrope", which is not supported
    spec = decoder_spec(config, "phi3", PHI3_LAYER, ("Phi3ForCausalLM",), fields, windows=_everywhere(config))
    if spec.rope_scaling:  # transformers takes YaRN's name for "longrope"
        raise InputError("rope_scaling: a Phi-3 with scaled RoPE is not supported")
    return spec


def olmo2(config: Mapping[str, Any]) -> ModelSpec:
    """OLMo 2: RMSNorm on the output of attention and MLP in place of their input, and on all heads of q and k
    together."""
    _require(config, "rms_norm_eps")
    return decoder_spec(config, "olmo2", OLMO2_LAYER, ("Olmo2ForCausalLM",))


def olmo3(config: Mapping[str, Any]) -> ModelSpec:
    """OLMo 3: OLMo 2 with a window in three of four layers, to which scaled RoPE does not apply."""
    _require(config, "rms_norm_eps")
    if config.get("rope_parameters") is not None or config.get("rope_theta") != OLMO3_THETA:
        raise InputError(  # SGLang reads no rope_parameters, and transformers no rope_theta for layers with a window
            f"rope_parameters: SGLang and transformers agree on an OLMo 3's RoPE only with rope_theta {OLMO3_THETA:g} "
            "and, where it is scaled, rope_scaling; write those, as the published models have them"
        )
    if (scaling := config.get("rope_scaling")) and "rope_type" not in scaling:
        raise InputError(
            "rope_scaling: no rope_type, without which transformers does not scale an OLMo 3's RoPE; give it"
        )
    types = ["full_attention" if i % 4 == 3 else "sliding_attention" for i in range(integer(config, LAYERS))]
    windows = read_windows({"sliding_window": 4096, **config}, types)
    spec = decoder_spec(config, "olmo3", OLMO2_LAYER, ("Olmo3ForCausalLM",), windows=windows)
    return replace(spec, local_rope_theta=spec.rope_theta if spec.rope_scaling and windows else None)


def granite(config: Mapping[str, Any]) -> ModelSpec:
    """Granite 3, dense: Llama with four factors."""
    if flag(config, "mlp_bias"):
        raise InputError("mlp_bias: true is not supported")
    return replace(
        decoder_spec(config, "granite", DENSE_LAYER, ("GraniteForCausalLM",), GRANITE_FIELDS),
        attention_scale=number(config, "attention_multiplier", 1.0),
        embedding_scale=number(config, "embedding_multiplier", 1.0),
        residual_scale=number(config, "residual_multiplier", 1.0),
        logit_scale=1 / number(config, "logits_scaling", 1.0),
    )


def _everywhere(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The window of a family in all of whose layers transformers applies it, whatever layer_types has."""
    kind = "full_attention" if config.get("sliding_window") is None else "sliding_attention"
    types = [kind] * integer(config, LAYERS)
    if config.get("layer_types") not in (None, types):
        raise InputError(f"layer_types: all layers of this family have {kind}; remove it")
    return read_windows(config, types)


def _from_a_layer_on(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Qwen's windows: in the layers from max_window_layers on, where layer_types does not say otherwise."""
    used = flag(config, "use_sliding_window") and config.get("sliding_window", 4096) is not None
    first = integer(config, "max_window_layers", 28, least=0)
    types = ["sliding_attention" if used and i >= first else "full_attention" for i in range(integer(config, LAYERS))]
    windows = read_windows({"sliding_window": 4096, **config}, types)
    if windows and not used:
        raise InputError("layer_types: has sliding_attention, and use_sliding_window is not true")
    return windows


def _require(config: Mapping[str, Any], key: str) -> None:
    if config.get(key) is None:
        raise InputError(f"{key}: missing, and families differ in what that means; give it")


FAMILIES: dict[str, Callable[[Mapping[str, Any]], ModelSpec]] = {
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "glm4": glm4,
    "smollm3": smollm3,
    "phi3": phi3,
    "olmo2": olmo2,
    "olmo3": olmo3,
    "gemma3_text": gemma3_text,
    "granite": granite,
}


__all__ = ["FAMILIES", "ModelSpec", "load_model_config"]

ALIASES = {"mistral": "llama"}  # model_type -> the family that computes the same from the fields that it knows


def load_model_config(path: str | Path, family: str | None = None, source: str = "own") -> ModelSpec:
    """Reads `path`/config.json. `family`: None, or the family that the file's model_type belongs to. `source`: as
    model.source. Raises ValueError,
    one line with the path, if there is no config.json, or if it is malformed, has a field that cannot be mapped or an
    unknown model_type: a model with Llama's fields may compute something else."""
    file = Path(path) / "config.json"
    if not file.parent.is_dir():
        raise InputError(
            f"{path}: no such folder; give a Hugging Face folder on this machine, or one that `convert hf2mcore` wrote"
        )
    if not file.is_file():
        raise InputError(f"{file}: no such file; give a folder with config.json, weights and tokenizer")
    config = plain_json.read_object(file)
    kind = config.get("model_type")
    if source == "bridge":
        if family is not None:
            raise InputError(f"model.family: {family!r} is of model.source: own; leave it out")
        return _of(file, lambda: bridged_spec(config, file.parent))
    name = ALIASES.get(kind, kind) if isinstance(kind, str) else None
    if name not in FAMILIES:
        raise InputError(
            f"{file}: model_type {kind!r:.80} is not supported, and model.family does not change that; supported are "
            f"{', '.join([*FAMILIES, *ALIASES])}, and others with model.source: bridge (docs/checkpoints.md)"
        )
    if family not in (None, name):
        raise InputError(f"{file}: model_type {kind!r} is of family {name}, model.family is {family!r}; leave it out")
    return _of(file, lambda: FAMILIES[name](config))


def _of(file: Path, read: Callable[[], ModelSpec]) -> ModelSpec:
    try:
        return read()
    except ValueError as error:
        raise InputError(f"{file}: {on_one_line(str(error), 1000)}") from None
