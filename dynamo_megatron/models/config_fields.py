"""The fields of config.json: which are understood, and their values, checked. A field that is on no list here is
refused, whatever it means: no list of harmful fields could have those of next year's models."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from dynamo_megatron.errors import InputError

_DECODER = """
    head_dim hidden_size intermediate_size layer_types max_position_embeddings max_window_layers model_type
    num_attention_heads num_hidden_layers num_key_value_heads partial_rotary_factor quantization_config rms_norm_eps
    rope_parameters rope_scaling rope_theta sliding_window tie_word_embeddings vocab_size
"""
_FILE = """
    _attn_implementation _attn_implementation_autoset _commit_hash _model_name_or_path _name_or_path
    _sliding_window_pattern attn_implementation bos_token_id cache_implementation decoder_start_token_id dtype
    eos_token_id finetuning_task is_llama_config name_or_path pad_token_id sep_token_id task_specific_params
    tokenizer_class torch_dtype transformers.js_config transformers_version unk_token_id unsloth_fixed unsloth_version
"""
_TRAINING_AND_OUTPUTS = """
    chunk_size_feed_forward id2label initializer_range label2id num_labels output_attentions output_hidden_states
    output_router_logits pretraining_tp problem_type return_dict router_aux_loss_coef tf_legacy_loss
    tie_last_hidden_states torchscript use_bfloat16 use_cache
"""
_SAMPLING = """
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length max_new_tokens
    min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores remove_invalid_values
    repetition_penalty return_dict_in_generate suppress_tokens temperature top_k top_p typical_p
"""
_FALSE = """
    add_cross_attention attention_bias is_decoder is_encoder_decoder mlp_bias rope_interleaved tie_encoder_decoder
    use_bidirectional_attention use_mrope use_sliding_window
"""
# Read by every family (family.py); each adds its own.
DECODER = frozenset(_DECODER.split())
# Leave the logits of a given sequence unchanged, with any value.
HARMLESS = frozenset(f"{_FILE} {_TRAINING_AND_OUTPUTS} {_SAMPLING}".split())
# Leave the logits unchanged if they have this value, in every family that does not read them.
HARMLESS_AS: dict[str, Any] = {
    **dict.fromkeys(_FALSE.split(), False),
    **dict.fromkeys(("attention_dropout", "embd_pdrop", "resid_pdrop"), 0),
    **{"per_layer_config": {}, "pruned_heads": {}},
}


def check_fields(
    config: Mapping[str, Any], read: Collection[str], only: Mapping[str, Any], architectures: Collection[str]
) -> None:
    """Raises ValueError naming the first field that is neither `read`, nor null, nor harmless, nor as in `only`. Also
    if config.json's architectures, by which SGLang chooses the model's class, has a name that is not in
    `architectures`."""
    for key, value in config.items():
        if key in read or key in HARMLESS or value is None:
            continue
        if key == "architectures":
            if not isinstance(value, list) or any(name not in architectures for name in value):
                raise InputError(f"architectures: {value!r} is not supported, only {', '.join(architectures)}")
        elif key not in only:
            raise InputError(
                f"{key}: {value!r} is not supported: the field is neither implemented nor known to leave what the "
                "model computes unchanged; remove it from config.json only if it has no effect on the logits"
            )
        elif value != only[key]:
            raise InputError(f"{key}: {value!r} is not supported, only {only[key]!r}")


def flag(config: Mapping[str, Any], key: str) -> bool:
    """A boolean of config.json, False if it is missing or null. Raises ValueError for anything else."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise InputError(f"{key}: {value!r} is not true or false")
    return bool(value)


def integer(config: Mapping[str, Any], key: str, default: int | None = None, least: int = 1) -> int:
    """An integer of config.json of at least `least`, `default` if missing or null. Raises ValueError otherwise."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise InputError(f"{key}: missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{key}: {value!r} is not an integer of at least {least}")
    return value


def number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A positive finite number of config.json, `default` if missing or null. Raises ValueError for anything else."""
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InputError(f"{key}: {value!r} is not a positive number")
    return float(value)


def read_shape(config: Mapping[str, Any], head_dim: int | None = None) -> dict[str, Any]:
    """The fields of a ModelSpec that all models' config.json have under the same names. `head_dim`: where it has none;
    None: hidden size / heads. Raises ValueError."""
    if config.get("quantization_config") is not None:
        raise InputError("quantization_config: a quantised checkpoint cannot be trained; give the bf16 or fp32 one")
    heads, hidden = integer(config, "num_attention_heads"), integer(config, "hidden_size")
    return {
        "num_layers": integer(config, "num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": integer(config, "intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": integer(config, "num_key_value_heads", heads),
        "kv_channels": integer(config, "head_dim", head_dim or hidden // heads),
        "vocab_size": integer(config, "vocab_size"),
        "max_positions": integer(config, "max_position_embeddings"),
        "norm_eps": number(config, "rms_norm_eps", 1e-6),
    }
