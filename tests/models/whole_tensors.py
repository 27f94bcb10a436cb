"""The way back from a stage's parameters, apart from the plan that pushes and exports follow."""

from collections.abc import Iterator

import torch
import torch.distributed as dist

from dynamo_megatron.models import ModelSpec
from dynamo_megatron.models.mapping import OUTPUT_LAYER, global_name, is_sharded, to_huggingface


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
