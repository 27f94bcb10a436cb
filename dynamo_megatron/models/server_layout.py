"""An SGLang server's own parameters, fused and cut over its ranks, from Hugging Face tensors. Pure functions.

All families that SGLang has agree: q, k and v are one parameter, gate and up another, and all experts of an MLP two.
Every fused parameter consists of its parts one after the other along the first dimension. For the other ones it runs
transformers' modules, where nothing is fused. (SGLang 0.5.23: layers/linear.py, layers/vocab_parallel_embedding.py,
layers/quantization/unquant.py, models/transformers.py; experts cut by tensor parallelism alone.)
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from dynamo_megatron.errors import InputError
from dynamo_megatron.models.mapping import (
    HF_EMBEDDING,
    expert_number,
    huggingface_names,
    huggingface_shapes,
    parameter_names,
    qkv_rows,
)
from dynamo_megatron.models.spec import ModelSpec
from dynamo_megatron.runtime.late import torch

# How a server's tensor-parallel ranks cut a Hugging Face tensor, by the module it belongs to; others are whole.
CUTS = {
    **dict.fromkeys(("q_proj", "gate_proj", "up_proj"), "column"),
    **dict.fromkeys(("k_proj", "v_proj"), "kv"),
    "qkv_proj": "qkv",
    "gate_up_proj": "gate_up",
    **dict.fromkeys(("o_proj", "down_proj"), "row"),
    **dict.fromkeys(("embed_tokens", "lm_head"), "vocab"),
}
VOCAB_PADDING = 64
CPU_WIDTH = 32


@dataclass(frozen=True)
class ServerLayout:
    """Where each Hugging Face tensor is in the server's parameters; the same on every rank of the server. A tied
    model's head is its embedding and has no entry."""

    places: Mapping[str, tuple[str, int]]  # Hugging Face tensor -> (parameter, first element of its shard there)
    sizes: Mapping[str, int]  # parameter -> elements of a rank's shard, padding included


@functools.cache
def server_layout(spec: ModelSpec, tp_size: int) -> ServerLayout:
    """Returns the layout of a server with `tp_size` ranks, which must divide the model (`check_server_parallel`)."""
    shapes = huggingface_shapes(spec)
    places: dict[str, tuple[str, int]] = {}
    sizes: dict[str, int] = {}
    for name in parameter_names(spec):
        parts = huggingface_names(spec, name)
        for part in parts:
            fused = part if not spec.served.fused else _fused_name(parts, expert_number(name) is not None)
            shard = server_shard(spec, part, torch.empty(shapes[part], device="meta"), 0, tp_size)
            places[part] = fused, sizes.get(fused, 0)
            padded = server_cut(spec, part) == "vocab"
            elements = server_vocab_rows(spec, tp_size) * shard.shape[1] if padded else shard.numel()
            sizes[fused] = sizes.get(fused, 0) + elements
    return ServerLayout(places, sizes)


def check_server_parallel(spec: ModelSpec, tp_size: int, device: str) -> None:
    """Raises ValueError if SGLang cannot cut the model over `tp_size` ranks, or if on a CPU it would pad heads and MLPs
    to other sizes (configs/update_config.py), which nothing here reproduces."""
    heads, groups = spec.num_attention_heads, spec.num_query_groups
    width = spec.moe_ffn_hidden_size or spec.ffn_hidden_size
    on_cpu = device == "cpu"
    kv_fits = groups % tp_size == 0 or (tp_size % groups == 0 and not on_cpu and spec.served.fused)
    if heads % tp_size or not kv_fits or width % (tp_size * (CPU_WIDTH if on_cpu else 1)):
        multiple = f"a multiple of {CPU_WIDTH} times it" if on_cpu else "a multiple of it"
        other = "use another rollout.tp or " if tp_size > 1 else ""
        raise InputError(
            f"rollout.tp: {tp_size} server ranks cannot be proved to hold a model of {heads} attention and {groups} "
            f"key/value heads and an MLP width of {width}, which must be {multiple}; {other}set "
            "rollout.proof.checksums=false"
        )


def check_served(spec: ModelSpec, longest: int) -> None:
    """Raises ValueError if SGLang would serve another model than the policy's for sequences of up to `longest` tokens:
    by ModelSpec.served."""
    if not spec.served.windows and 0 < spec.window < longest:
        raise InputError(
            f"sliding_window: SGLang ignores this model's window of {spec.window} tokens and would sample from another "
            f"model in longer sequences; set model.max_length to {spec.window} or less (it is {longest})"
        )
    if spec.served.whole_embedding and not spec.tied:
        raise InputError("tie_word_embeddings: false, and SGLang serves this model with its embedding as the head")
    if not spec.served.head_dim and spec.kv_channels * spec.num_attention_heads != spec.hidden_size:
        raise InputError("head_dim: SGLang serves this model with heads of hidden_size / num_attention_heads alone")


def server_vocab_rows(spec: ModelSpec, tp_size: int) -> int:
    """Rows of the embedding on each rank, padding included."""
    multiple = VOCAB_PADDING
    if -(-spec.vocab_size // multiple) * multiple % tp_size:
        multiple *= tp_size
    return -(-spec.vocab_size // multiple) * multiple // tp_size


def server_shard(spec: ModelSpec, name: str, tensor: torch.Tensor, tp_rank: int, tp_size: int) -> torch.Tensor:
    """Rank `tp_rank`'s part of the whole Hugging Face tensor `name`, without padding; may share its memory."""
    cuts = min(tp_size, spec.num_query_groups)  # with more ranks than key/value heads, neighbours hold the same
    match server_cut(spec, name):
        case "column":
            return tensor.chunk(tp_size)[tp_rank]
        case "kv":
            return tensor.chunk(cuts)[tp_rank * cuts // tp_size]
        case "qkv":
            sizes = qkv_rows(spec)  # of scales it has a row for each block
            q, *kv = tensor.split([size * len(tensor) // sum(sizes) for size in sizes])
            return torch.cat([q.chunk(tp_size)[tp_rank], *(t.chunk(cuts)[tp_rank * cuts // tp_size] for t in kv)])
        case "gate_up":
            return torch.cat([half.chunk(tp_size)[tp_rank] for half in tensor.chunk(2)])
        case "row" if tensor.dim() > 1:  # its bias is whole
            return tensor.chunk(tp_size, dim=1)[tp_rank]
        case "vocab":
            rows = server_vocab_rows(spec, tp_size)
            return tensor[tp_rank * rows : (tp_rank + 1) * rows]
    return tensor


def server_cut(spec: ModelSpec, name: str) -> str:
    """How the ranks cut a Hugging Face tensor: one of the values of CUTS, or "whole"."""
    if name == HF_EMBEDDING and spec.served.whole_embedding:
        return "whole"
    return CUTS.get(name.split(".")[-2], "whole")


def _fused_name(parts: tuple[str, ...], expert: bool) -> str:
    """The server's name of the parameter that consists of `parts` in this order (of experts: contains them)."""
    first = parts[0]
    if expert:
        return first.partition(".experts.")[0] + (".experts.w13_weight" if len(parts) == 2 else ".experts.w2_weight")
    if len(parts) == 3:
        return first.replace(".q_proj.", ".qkv_proj.")
    return first.replace(".gate_proj.", ".gate_up_proj.") if len(parts) == 2 else first
