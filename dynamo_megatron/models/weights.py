"""Hugging Face weights into one rank's Megatron stage, and out of it again."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from dynamo_megatron.models.checkpoint_files import SafetensorsFolder
from dynamo_megatron.models.mapping import (
    OUTPUT_LAYER,
    expert_number,
    global_name,
    huggingface_names,
    is_sharded,
    to_huggingface,
    to_megatron,
)
from dynamo_megatron.models.spec import ModelSpec


@torch.no_grad()
def load_weights(
    model: torch.nn.Module,
    spec: ModelSpec,
    folder: SafetensorsFolder,
    *,
    layer_offset: int = 0,
    tp_rank: int = 0,
    tp_size: int = 1,
    ep_rank: int = 0,
    ep_size: int = 1,
) -> None:
    """Fills the parameters of a GPTModel, in their dtype and on their device; its first layer is the model's layer
    `layer_offset`. A stage of several chunks (interleaved pipeline) calls it once for each.

    Raises ValueError naming the parameter: unknown to the family, of another shape than its shard, filled twice, or a
    tensor of one of the chunk's layers (its own experts' only) with no parameter.
    """
    experts = spec.experts_of(ep_rank, ep_size)
    used: dict[str, str] = {}
    for local_name, parameter in model.named_parameters():
        name = global_name(local_name, layer_offset, experts.start)
        names = huggingface_names(spec, name)
        for tensor in names:
            if tensor in used:
                raise ValueError(f"{name}: made of {tensor}, which {used[tensor]} has taken")
            used[tensor] = name
        shard = to_megatron(spec, name, [folder.get(tensor) for tensor in names], tp_rank, tp_size)
        if shard.shape != parameter.shape:
            raise ValueError(
                f"{name}: {list(parameter.shape)} in the model, {list(shard.shape)} on rank {tp_rank} of tp {tp_size}"
            )
        parameter.copy_(shard)
    for layer in {tensor.split(".")[2] for tensor in used if tensor.startswith("model.layers.")}:
        for parameter_name, parts in spec.layer_names.items():
            expert = expert_number(parameter_name)
            if expert is not None and expert not in experts:
                continue
            for tensor in (f"model.layers.{layer}.{part}" for part in parts):
                if tensor not in used:
                    raise ValueError(f"{folder.path}: tensor {tensor} has no parameter in the model")


@torch.no_grad()
def named_huggingface_tensors(
    model: torch.nn.Module,
    spec: ModelSpec,
    *,
    layer_offset: int = 0,
    tp_group: dist.ProcessGroup | None = None,
    ep_rank: int = 0,
    ep_size: int = 1,
) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, whole tensor) of every parameter of this chunk, in the parameters' dtype and device.

    A collective over `tp_group` (None: not sharded): its ranks must iterate in step, to the end. One parameter is
    whole at a time; a tensor may share memory with the model's. A tied model gives no `lm_head.weight`. Experts
    (`mapping.is_expert`) are this rank's own, so that the ranks of `tp_group` may give different ones.
    """
    tp_size = dist.get_world_size(tp_group) if tp_group is not None else 1
    expert_offset = spec.experts_of(ep_rank, ep_size).start
    for local_name, parameter in model.named_parameters():
        name = global_name(local_name, layer_offset, expert_offset)
        if name == OUTPUT_LAYER and spec.tied:
            continue
        shard = parameter.detach()
        shards = [shard]
        if tp_size > 1 and is_sharded(name):
            shards = [torch.empty_like(shard) for _ in range(tp_size)]
            dist.all_gather(shards, shard.contiguous(), group=tp_group)
        yield from to_huggingface(spec, name, shards).items()
