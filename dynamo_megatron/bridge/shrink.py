"""A small model of the same kind: config.json with few layers and small widths, and every switch as it is.

And which field of a config makes a check fail, where the same model with the family's defaults passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

LAYERS = 6  # of a model whose layers are not listed as of several kinds; else all
PROBE = 96  # tokens of the longest sequence that is compared; windows and position limits are made shorter
WINDOW = 24
KINDS = "layer_types"
VOCABULARY = 160
HIDDEN = 64
WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "moe_ffn_hidden_size")
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
SHORT = ("max_position_embeddings", "sliding_window", "attention_chunk_size")
RANKS = {"q_lora_rank": 24, "kv_lora_rank": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
# What says nothing of what the model computes.
_SILENT = """
    architectures model_type transformers_version dtype torch_dtype use_cache initializer_range _name_or_path
    bos_token_id eos_token_id pad_token_id attention_dropout hidden_dropout router_aux_loss_coef aux_loss_alpha
    output_router_logits is_encoder_decoder id2label label2id problem_type chunk_size_feed_forward return_dict
    output_hidden_states output_attentions auto_map seq_aux pretraining_tp
"""
SILENT = frozenset(_SILENT.split())
_SIZES = """
    hidden_size vocab_size num_hidden_layers num_attention_heads num_key_value_heads linear_num_key_heads
    linear_num_value_heads qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim head_dim
"""
SIZES = frozenset((*_SIZES.split(), *WIDTHS, *EXPERTS, *RANKS))


def shrink(raw: Mapping[str, Any], full: Mapping[str, Any]) -> dict[str, Any]:
    """config.json's content `raw`, made small. `full`: with what transformers adds to it, its own defaults."""
    has = {key: value for key, value in full.items() if value is not None}
    layers, hidden = has["num_hidden_layers"], has["hidden_size"]
    lists = {k: v for k, v in has.items() if isinstance(v, list) and len(v) == layers and (k in raw or k == KINDS)}
    seen = 1 + max((kinds.index(kind) for kinds in lists.values() for kind in kinds), default=0)  # each kind once
    few = layers if seen > 1 and not _linear(lists) else min(layers, max(LAYERS, seen))
    small: dict[str, Any] = {"num_hidden_layers": few, "hidden_size": HIDDEN, "vocab_size": VOCABULARY}
    wider = iter(range(96, 1000, 32))
    sizes = {hidden: HIDDEN}
    for value in sorted({has[key] for key in WIDTHS if isinstance(has.get(key), int)}):
        if value != hidden:  # equal widths stay equal
            sizes[value] = 48 if value < hidden and 48 not in sizes.values() else next(wider)
    small |= {key: sizes[has[key]] for key in WIDTHS if isinstance(has.get(key), int)}
    heads = has["num_attention_heads"]
    groups = has.get("num_key_value_heads", heads)
    small["num_attention_heads"] = 4
    if "num_key_value_heads" in has:
        small["num_key_value_heads"] = 4 if groups == heads else min(groups, 2)
    small |= _head_sizes(has, hidden == heads * has.get("head_dim", hidden // heads))
    small |= {key: value for key, value in RANKS.items() if key in has}
    if "linear_num_key_heads" in has:
        small["linear_num_key_heads"] = 2
        small["linear_num_value_heads"] = 2 if has["linear_num_value_heads"] == has["linear_num_key_heads"] else 4
    small |= _experts(has)
    small |= {key: min(has[key], WINDOW) for key in SHORT if isinstance(has.get(key), int)}
    for key in ("first_k_dense_replace", "max_window_layers"):
        if key in has:
            small[key] = has[key] if few == layers else few if has[key] >= layers else min(has[key], few // 2)
    small |= {key: kinds[:few] for key, kinds in lists.items() if key in raw}
    for key, value in has.items():
        if key == "mlp_only_layers" and value:
            small[key] = [n for n in value if n < few] or [0]
        elif key.endswith("_token_id") and key in raw:
            small[key] = None
    return {**raw, **small}


def _linear(lists: Mapping[str, list[Any]]) -> bool:
    """Whether rounding grows too much from layer to layer to compare all of them."""
    return any("linear_attention" in kinds for kinds in lists.values())


def _head_sizes(has: Mapping[str, Any], plain: bool) -> dict[str, int]:
    small = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}
    if has.get("v_head_dim") == has.get("qk_nope_head_dim"):
        small["v_head_dim"] = 16
    small = {key: value for key, value in small.items() if key in has}
    if "qk_head_dim" in has and "qk_nope_head_dim" in has:
        small["qk_head_dim"] = 24
    if "head_dim" in has:
        small["head_dim"] = 8 if has["head_dim"] == has.get("qk_rope_head_dim") else 16 if plain else 32
    return small


def _experts(has: Mapping[str, Any]) -> dict[str, int]:
    small: dict[str, int] = {}
    groups, count, chosen = has.get("n_group", 1), 8, min(has.get("num_experts_per_tok", 1), 4)
    if groups > 1:  # Megatron scores a group by as many experts as are chosen of each: their ratio matters
        small["n_group"] = min(groups, 4)
        of = has.get("topk_group", groups)
        small["topk_group"] = max(1, of * small["n_group"] // groups)
        chosen = max(1, has.get("num_experts_per_tok", 1) * small["topk_group"] // of)
        count = small["n_group"] * max(3, -(-chosen // small["topk_group"]))
    for key in EXPERTS:
        if isinstance(has.get(key), int) and has[key] > 0:
            small[key] = min(has[key], count)
    if small and "num_experts_per_tok" in has:
        small["num_experts_per_tok"] = chosen
    return small


def differing_field(
    config: Mapping[str, Any], defaults: Mapping[str, Any], passes: Callable[[dict[str, Any]], bool]
) -> str | None:
    """The field of `config`, with its value, without which `passes` holds: set to its value in `defaults`, or left out.
    A nested field is named `outer.inner`. Several, joined by commas, where one alone does not do. None: the check fails
    with all of them at their defaults."""
    fields = list(_different(config, defaults))
    for field in fields:
        if passes(_without(config, defaults, [field])):
            return _named(config, field)
    if not passes(_without(config, defaults, fields)):
        return None
    needed = list(fields)  # drop those that do not matter, one after the other
    for field in fields:
        if len(needed) > 1 and passes(_without(config, defaults, [f for f in needed if f != field])):
            needed.remove(field)
    return ", ".join(_named(config, field) for field in needed)


Field = tuple[str, ...]


def _different(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[Field]:
    for key, value in config.items():
        default = defaults.get(key)
        if key in SILENT or value == default:
            continue
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            inner = [(key, name) for name, v in value.items() if v != default.get(name)]
            if all(name != "rope_type" for _, name in inner):
                yield from inner
        yield (key,)


def _without(config: Mapping[str, Any], defaults: Mapping[str, Any], fields: list[Field]) -> dict[str, Any]:
    result = dict(config)
    for field in fields:
        holder, of, key = result, defaults, field[0]
        if len(field) == 2:
            holder = result[field[0]] = dict(result[field[0]] or {})
            of, key = defaults.get(field[0]) or {}, field[1]
        if key in of:
            holder[key] = of[key]
        else:
            holder.pop(key, None)
    return result


def _named(config: Mapping[str, Any], field: Field) -> str:
    value = config[field[0]] if len(field) == 1 else config[field[0]][field[1]]
    return f"{'.'.join(field)}: {value!r:.120}"
