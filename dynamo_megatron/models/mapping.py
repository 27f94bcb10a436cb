"""Names and shapes: Megatron's parameters <-> Hugging Face's tensors. Pure functions on tensors.

Megatron names are GPTModel's, with global layer and expert numbers; the local layer spec's names and
TransformerEngine's (where a norm is fused into the linear that follows it) are both understood. Shapes below are
Hugging Face's, [out, in]. An expert is whole on its rank: tensor parallelism does not cut it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from dynamo_megatron.errors import InputError
from dynamo_megatron.models.spec import ModelSpec
from dynamo_megatron.runtime.late import torch

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
HF_EMBEDDING = "model.embed_tokens.weight"
HF_HEAD = "lm_head.weight"
ROUTER_BIAS = "e_score_correction_bias"  # of Hugging Face, in the choice of experts alone
# SGLang fuses it with linear_q_down_proj as it loads both at once, and drops one that comes alone.
KV_DOWN = "self_attention.linear_kv_down_proj.weight"
OUTSIDE_LAYERS: dict[str, tuple[str, ...]] = {
    EMBEDDING: (HF_EMBEDDING,),
    "decoder.final_layernorm.weight": ("model.norm.weight",),
    OUTPUT_LAYER: (HF_HEAD,),
}
TRANSFORMER_ENGINE_NAMES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
# How a parameter is cut over the tensor-parallel ranks; parameters that are not listed are replicated.
LAYOUT = {
    EMBEDDING: "vocab",
    OUTPUT_LAYER: "vocab",
    "self_attention.linear_qkv.weight": "qkv",
    "self_attention.linear_qkv.bias": "qkv",
    "self_attention.q_layernorm.scales": "column",
    "self_attention.k_layernorm.scales": "column",
    "self_attention.linear_proj.weight": "row",
    "mlp.linear_fc1.weight": "gate_up",
    "mlp.linear_fc2.weight": "row",
}
DIMENSION = {"column": 0, "row": 1}

LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
# SequentialMLP's, and the grouped linears' of TransformerEngine
_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))|(linear_fc[12]\.(?:weight|bias))(\d+))"
)


def global_name(name: str, layer_offset: int, expert_offset: int = 0) -> str:
    """A rank's own parameter name -> the whole model's: wrappers' `module.` dropped, layer and expert numbers moved.

    The result names experts as SequentialMLP does, `mlp.experts.local_experts.N.linear_fc1.weight`.
    """
    name = re.sub(r"^(module\.)+", "", name)
    layer = LAYER.fullmatch(name)
    if layer is None:
        return name
    within = layer[2]
    if expert := _EXPERT.fullmatch(within):
        number = int(expert[1] or expert[4]) + expert_offset
        within = f"mlp.experts.local_experts.{number}.{expert[2] or expert[3]}"
    return f"decoder.layers.{int(layer[1]) + layer_offset}.{within}"


def expert_number(name: str) -> int | None:
    """The number of the expert that a parameter or tensor (either side's name, global) belongs to, or None. The ranks
    of an expert-parallel group hold different experts, each of them whole."""
    expert = re.search(r"mlp\.experts\.(?:local_experts\.)?(\d+)\.", name)
    return int(expert[1]) if expert else None


def is_expert(name: str) -> bool:
    """Whether a parameter or tensor (either side's name) belongs to one expert."""
    return "mlp.experts." in name


def parameter_names(spec: ModelSpec) -> Iterator[str]:
    """Yields the names of Megatron's parameters of the whole model, without the copy of a tied head."""
    if spec.bridged is not None:
        yield from spec.bridged.parameters
        return
    yield EMBEDDING
    for layer in range(spec.num_layers):
        yield from (f"decoder.layers.{layer}.{part}" for part in spec.layer_names)
    yield "decoder.final_layernorm.weight"
    if not spec.tied:
        yield OUTPUT_LAYER


def huggingface_names(spec: ModelSpec, name: str) -> tuple[str, ...]:
    """The Hugging Face tensors that Megatron's parameter `name` is made of, in order.

    The output layer of a tied model is made of the embedding. Raises ValueError for a name the family does not have.
    """
    if spec.bridged is not None:
        return spec.bridged.parameters.get(name, (name,))
    layer = LAYER.fullmatch(name)
    if layer is None:
        tied = name == OUTPUT_LAYER and spec.tied
        names = (HF_EMBEDDING,) if tied else OUTSIDE_LAYERS.get(name, ())
    else:
        key = TRANSFORMER_ENGINE_NAMES.get(layer[2], layer[2])
        parts = spec.layer_names.get(key, ()) if int(layer[1]) < spec.num_layers else ()
        names = tuple(f"model.layers.{layer[1]}.{part}" for part in parts)
    if not names:
        raise InputError(f"{name}: not a parameter of a {spec.family} model with {spec.num_layers} layers")
    return names


def huggingface_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of the Hugging Face folder and its shape; a tied model's `lm_head.weight` is left out."""
    if spec.bridged is not None:
        return dict(spec.bridged.shapes)
    hidden, head, ffn = spec.hidden_size, spec.kv_channels, spec.moe_ffn_hidden_size or spec.ffn_hidden_size
    q, kv, _ = qkv_rows(spec)
    by_module: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(("embed_tokens", "lm_head"), (spec.vocab_size, hidden)),
        "q_proj": (q, hidden),
        **dict.fromkeys(("k_proj", "v_proj"), (kv, hidden)),
        "qkv_proj": (q + 2 * kv, hidden),
        "q_norm": (q if spec.wide_qk_norm else head,),
        "k_norm": (kv if spec.wide_qk_norm else head,),
        "o_proj": (hidden, q),
        "gate": (spec.num_experts, hidden),
        **dict.fromkeys(("gate_proj", "up_proj"), (ffn, hidden)),
        "gate_up_proj": (2 * ffn, hidden),
        "down_proj": (hidden, ffn),
    }
    names = [name for parameter in parameter_names(spec) for name in huggingface_names(spec, parameter)]
    shapes = {name: by_module.get(name.split(".")[-2], (hidden,)) for name in names}  # other modules are norms
    return {name: shape[:1] if name.endswith(".bias") else shape for name, shape in shapes.items()}


def cut(names: Sequence[str], sizes: Mapping[str, int], most: int) -> list[tuple[str, ...]]:
    """Divides `names` in order into parts of at most `most` bytes, or of one name; KV_DOWN goes with the one before it.
    `sizes`: of each in bytes."""
    parts: list[tuple[str, ...]] = []
    left = 0
    for name in names:
        if not parts or (sizes[name] > left and not name.endswith(KV_DOWN)):
            parts, left = [*parts, ()], most
        parts[-1] += (name,)
        left -= sizes[name]
    return parts


def is_sharded(name: str) -> bool:
    """Whether tensor-parallel ranks hold different parts of parameter `name` (else each holds all of it)."""
    return layout_of(name) != "replicated" and not is_expert(name)


def to_megatron(
    spec: ModelSpec, name: str, tensors: Sequence[torch.Tensor], tp_rank: int, tp_size: int
) -> torch.Tensor:
    """Rank `tp_rank`'s shard of parameter `name` from the whole Hugging Face tensors, as `huggingface_names` orders
    them, in their dtype. The vocabulary is padded with zero rows. May share memory with the input."""
    layout = layout_of(name)
    if is_expert(name):
        tp_rank, tp_size = 0, 1
    if layout == "qkv":
        if len(tensors) == 1:
            tensors = tensors[0].split(qkv_rows(spec))
        grouped = [t.unflatten(0, (spec.num_query_groups, -1)).chunk(tp_size)[tp_rank] for t in tensors]
        return torch.cat(grouped, dim=1).flatten(0, 1)
    if layout == "gate_up":
        halves = tensors if len(tensors) == 2 else tensors[0].chunk(2)
        return torch.cat([t.chunk(tp_size)[tp_rank] for t in halves])
    (tensor,) = tensors
    if layout in DIMENSION:
        return tensor.chunk(tp_size, DIMENSION[layout])[tp_rank]
    if layout == "vocab":
        rows = spec.padded_vocab(tp_size) // tp_size
        shard = tensor[tp_rank * rows : (tp_rank + 1) * rows]
        return torch.cat([shard, shard.new_zeros(rows - len(shard), tensor.shape[1])])
    return tensor


def to_huggingface(spec: ModelSpec, name: str, shards: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The Hugging Face tensors of parameter `name` from the shards of all tensor-parallel ranks, in rank order.

    The inverse of `to_megatron`: padding is cut off. For a parameter that is not sharded, `shards` may have one entry
    or one per rank. The result may share memory with the shards.
    """
    names = huggingface_names(spec, name)
    layout = layout_of(name)
    if is_expert(name):
        shards = shards[:1]
    if layout == "qkv":
        grouped = _joined(shards).unflatten(0, (spec.num_query_groups, -1))
        q = spec.num_attention_heads // spec.num_query_groups * spec.kv_channels
        parts = [part.flatten(0, 1) for part in grouped.split([q, spec.kv_channels, spec.kv_channels], dim=1)]
    elif layout == "gate_up":
        parts = [_joined(halves) for halves in zip(*(s.chunk(2) for s in shards), strict=True)]
    elif layout in DIMENSION:
        parts = [_joined(shards, DIMENSION[layout])]
    elif layout == "vocab":
        parts = [_joined(shards)[: spec.vocab_size]]
    else:
        parts = [shards[0]]
    if len(names) == 1 < len(parts):
        parts = [torch.cat(parts)]
    return dict(zip(names, parts, strict=True))


def qkv_rows(spec: ModelSpec) -> tuple[int, int, int]:
    """Rows of a layer's query, key and value projections."""
    kv = spec.num_query_groups * spec.kv_channels
    return spec.num_attention_heads * spec.kv_channels, kv, kv


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite."""
    # NaN comes out of aminmax as both; isfinite of the whole tensor would take another one of its size.
    return tensor.numel() == 0 or all(bool(torch.isfinite(end)) for end in tensor.aminmax())


def _joined(shards: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    return shards[0] if len(shards) == 1 else torch.cat(list(shards), dim=dim)


def layout_of(name: str) -> str:
    """How tensor-parallel ranks cut parameter `name`, one of LAYOUT's values or "replicated"; experts are not cut."""
    layer = LAYER.fullmatch(name)
    key = TRANSFORMER_ENGINE_NAMES.get(layer[2], layer[2]) if layer else name
    if expert := _EXPERT.fullmatch(key):
        key = f"mlp.{expert[2] or expert[3]}"
    return LAYOUT.get(key, "replicated")
