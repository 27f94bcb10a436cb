"""Gradient buffers, and when the data-parallel ranks add them up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from dynamo_megatron.policy.layout import Layout
from dynamo_megatron.policy.model import PolicyModel


def overlaps(layout: Layout) -> bool:
    """Whether gradients are reduced while the last micro-batch's backward pass still runs. Parameters are gathered with
    the optimizer's step, never in the next forward pass: pushes, saves and the head read them outside of any module."""
    return torch.cuda.is_available() and layout.dp_cp.size() > 1


def wrap(chunks: Sequence[PolicyModel], layout: Layout) -> list[DistributedDataParallel]:
    """Wraps each chunk in Megatron's DistributedDataParallel, which holds the gradient buffers."""
    megatron, overlap = chunks[0].config, overlaps(layout)
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=overlap
    )
    ddp = [DistributedDataParallel(megatron, config, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)]
    if overlap:  # else every micro-batch would count as the last one
        megatron.no_sync_func = ddp[0].no_sync if len(ddp) == 1 else [chunk.no_sync for chunk in ddp]
    return ddp
