"""A small model of the same kind: config.json with few layers and small widths, and every switch as it is.

And which field of a config makes a check fail, where the same model with the family's defaults passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dynamo_megatron.models.bridged import MULTI_TOKEN

LAYERS = 6  # of a model whose layers are not listed as of several kinds; else all
PROBE = 96  # tokens of the longest sequence that is compared
SHORT = 24  # windows and position limits
LIMITS = ("max_position_embeddings", "sliding_window", "attention_chunk_size")
KINDS = "layer_types"
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
    "num_experts": 32,  # how many are chosen, and of how many groups, stays
    "n_routed_experts": 32,
    "num_local_experts": 32,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
OTHERS = ("num_hidden_layers", "num_key_value_heads", "linear_num_value_heads", "head_dim")
SIZES = (*SMALL, *WIDTHS, *OTHERS, *MULTI_TOKEN)


def shrink(raw: Mapping[str, Any], full: Mapping[str, Any]) -> dict[str, Any]:
    """config.json's content `raw`, made small. `full`: with what transformers adds to it, its own defaults."""
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
    config: Mapping[str, Any], defaults: Mapping[str, Any], passes: Callable[[dict[str, Any]], bool]
) -> str | None:
    """The field of `config`, with its value, without which `passes` holds: set to its value in `defaults`, or left out.
    Several, joined by commas, where one alone does not do. None: the check fails with all of them at their defaults."""

    def without(fields: list[str]) -> dict[str, Any]:
        kept = {key: value for key, value in config.items() if key not in fields}
        return kept | {key: defaults[key] for key in fields if key in defaults}

    needed = [key for key, value in config.items() if key != "architectures" and value != defaults.get(key)]
    if not passes(without(needed)):
        return None
    size = len(needed)
    while size := size // 2:  # drop those that do not matter, ever fewer at once
        for start in reversed(range(0, len(needed), size)):
            rest = needed[:start] + needed[start + size :]
            if rest and passes(without(rest)):
                needed = rest
    return ", ".join(f"{key}: {config[key]!r:.120}" for key in needed)
