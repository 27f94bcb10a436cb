"""Models of `model.source: bridge`: what a run knows before Megatron-Bridge builds one, and config.json made small.

Names and shapes are those of the folder itself, which the loading compares with Bridge's (checkpoint/weights.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from dynamo_megatron.errors import InputError
from dynamo_megatron.models.config_fields import flag, integer, number, read_shape
from dynamo_megatron.models.mapping import HF_HEAD
from dynamo_megatron.models.spec import Bridged, ModelSpec, Served
from dynamo_megatron.runtime.plain_text import error_line

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MULTI_TOKEN = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
UNREAD = {  # what SGLang reads and transformers does not -> the families
    "partial_rotary_factor": ("llama", "mistral"),
    "rope_is_neox_style": ("llama", "mistral"),
    "dual_chunk_attention_config": ("qwen2", "qwen3_moe"),
}
WINDOWS_SERVED = ("gpt_oss",)  # SGLang 0.5.23 ignores those of other families that Bridge computes right
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
LAYERS = 6  # of a model whose layers are not listed as of several kinds; else all
PROBE = 96  # tokens of the longest sequence that is compared
SHORT = 24  # windows and position limits
LIMITS = ("max_position_embeddings", "sliding_window", "attention_chunk_size")
KINDS, SLIDING = "layer_types", "sliding_attention"
WIDTHS = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "moe_ffn_hidden_size",
)
SMALL = {
    "vocab_size": 160,
    "num_attention_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "v_head_dim": 24,
    **dict.fromkeys(EXPERTS, 32),  # how many are chosen, and of how many groups, stays
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
OTHERS = ("num_hidden_layers", "num_key_value_heads", "linear_num_value_heads", "head_dim")
SIZES = (*SMALL, *WIDTHS, *OTHERS, *MULTI_TOKEN)


def bridged_spec(config: Mapping[str, Any], folder: Path) -> ModelSpec:
    """Raises ValueError naming the field that is missing, or that is not supported."""
    kind = config.get("model_type")
    for key in MULTI_TOKEN:
        if config.get(key):
            raise InputError(
                f"{key}: {config[key]!r}; multi-token prediction is not trained with model.source: bridge: set it to 0 "
                "and leave its tensors out of the folder"
            )
    for key, families in UNREAD.items():
        if kind in families and config.get(key) not in (None, 1):
            raise InputError(
                f"{key}: {config[key]!r}; SGLang reads this field of a {kind} model and transformers ignores it: they "
                "would compute different models; remove it only if transformers' is the right one"
            )
    shapes = _shapes(folder)
    tied = flag(config, "tie_word_embeddings") or HF_HEAD not in shapes
    if tied:
        shapes.pop(HF_HEAD, None)
    width = integer(config, "intermediate_size", 4 * integer(config, "hidden_size"))
    experts = next((config[key] for key in EXPERTS if config.get(key)), 0)
    return ModelSpec(
        **read_shape({**config, "intermediate_size": width}),
        family=f"bridge:{kind}",
        rope_theta=number(config, "rope_theta", 10000.0),
        tied=tied,
        num_experts=experts,
        router_topk=integer(config, "num_experts_per_tok", 1) if experts else 0,
        moe_ffn_hidden_size=integer(config, "moe_intermediate_size", width) if experts else 0,
        windows=_windows(config),
        served=Served(windows=kind in WINDOWS_SERVED),
        bridged=Bridged(shapes),
    )


def read_config(raw: Mapping[str, Any]) -> PretrainedConfig:
    """As transformers reads a folder with this config.json. Raises InputError."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    try:
        return CONFIG_MAPPING[raw["model_type"]].from_dict(dict(raw))
    except (AttributeError, KeyError, TypeError, ValueError, StrictDataclassError) as error:
        kind = raw.get("model_type")
        raise InputError(f"transformers reads no model_type {kind!r:.80} from it ({error_line(error, 160)})") from None


def _windows(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The spec's: with transformers' defaults, and without fields that the family does not have."""
    read = read_config(config)
    has = {key: getattr(read, key) for key in ("sliding_window", KINDS) if hasattr(type(read), key)}
    window, kinds = has.get("sliding_window") or 0, has.get(KINDS) or [SLIDING] * read.num_hidden_layers
    return tuple(window * (kind == SLIDING) for kind in kinds) if window and SLIDING in kinds else ()


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Of the tensors in the folder's headers; without a tied model's head, and without rotary buffers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        try:
            with safe_open(file, framework="numpy") as opened:
                shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise InputError(f"{file.name}: corrupt or truncated ({error})") from None
    if not shapes:
        raise InputError("no model*.safetensors beside it; model.source: bridge needs the weights at once")
    return {name: shape for name, shape in shapes.items() if not name.endswith("rotary_emb.inv_freq")}


def shrink(raw: Mapping[str, Any], full: Mapping[str, Any]) -> dict[str, Any]:
    """config.json's content `raw` with few layers and small widths, and every switch as it is. `full`: with what
    transformers adds to it, its own defaults."""
    has = {key: value for key, value in full.items() if value is not None}
    layers, heads = has["num_hidden_layers"], has["num_attention_heads"]
    lists = {k: v for k, v in has.items() if isinstance(v, list) and len(v) == layers and (k in raw or k == KINDS)}
    kinds = 1 + max((values.index(value) for values in lists.values() for value in values), default=0)  # has each once
    linear = any("linear_attention" in values for values in lists.values())  # rounding grows from layer to layer
    least = max(LAYERS, kinds, has.get("first_k_dense_replace", 0) + 2)
    few = layers if kinds > 1 and not linear else min(layers, least)
    small: dict[str, Any] = {"num_hidden_layers": few, **{key: SMALL[key] for key in SMALL if has.get(key)}}
    widths = {key: has[key] for key in WIDTHS if isinstance(has.get(key), int)}
    order = sorted(set(widths.values()))  # equal widths stay equal
    small |= {key: 64 + 32 * order.index(width) for key, width in widths.items()}
    if "num_key_value_heads" in has:
        small["num_key_value_heads"] = 4 if has["num_key_value_heads"] == heads else min(has["num_key_value_heads"], 2)
    if "head_dim" in has:
        plain = has["head_dim"] * heads == has["hidden_size"]
        rotated = has["head_dim"] == has.get("qk_rope_head_dim")
        small["head_dim"] = 8 if rotated else small["hidden_size"] // 4 if plain else 56
    if "linear_num_key_heads" in has:
        small["linear_num_value_heads"] = 2 if has["linear_num_value_heads"] == has["linear_num_key_heads"] else 4
    small |= {key: min(has[key], SHORT) for key in LIMITS if isinstance(has.get(key), int)}
    small |= {key: values[:few] for key, values in lists.items() if key in raw}
    small |= {key: None for key in raw if key.endswith("_token_id")}
    if has.get("mlp_only_layers"):
        small["mlp_only_layers"] = [layer for layer in has["mlp_only_layers"] if layer < few] or [0]
    return {**raw, **small}


def differing_field(
    small: Mapping[str, Any], defaults: Mapping[str, Any], agrees: Callable[[dict[str, Any]], bool]
) -> str | None:
    """The field of the config `small`, with its value, without which a model `agrees`: set to its value in `defaults`,
    or left out. Several, joined by commas, where one alone does not do; None: it never does."""

    def without(fields: list[str]) -> dict[str, Any]:
        kept = {key: value for key, value in small.items() if key not in fields}
        return kept | {key: defaults[key] for key in fields if key in defaults}

    needed = [key for key, value in small.items() if key != "architectures" and value != defaults.get(key)]
    if not agrees(without(needed)):
        return None
    size = len(needed)
    while size := size // 2:  # drop those that do not matter, ever fewer at once
        for start in reversed(range(0, len(needed), size)):
            rest = needed[:start] + needed[start + size :]
            if rest and agrees(without(rest)):
                needed = rest
    return ", ".join(f"{key}: {small[key]!r:.120}" for key in needed)
