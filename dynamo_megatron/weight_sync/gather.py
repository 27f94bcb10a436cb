"""A bucket of the schedule from the ranks that hold it: whole Hugging Face tensors on its sender, quantised where the
schedule says so."""

from __future__ import annotations

import torch
import torch.distributed as dist

from dynamo_megatron.models.fp8 import quantize_tensors
from dynamo_megatron.models.mapping import OUTPUT_LAYER, global_name, huggingface_names, is_sharded, to_huggingface
from dynamo_megatron.policy.policy import Policy
from dynamo_megatron.weight_sync.schedule import Bucket, SendSchedule


class BucketSource:
    """This rank's part in gathering. All ranks call `gather` for every round, in order."""

    def __init__(self, policy: Policy, schedule: SendSchedule):
        layout, spec = policy.layout, policy.spec
        self._spec, self._schedule, self._layout = spec, schedule, layout
        stage, within = divmod(layout.rank, schedule.stage_ranks)
        assert (stage, within % layout.tp.size()) == (layout.pp.rank(), layout.tp.rank()), "not Megatron's rank order"
        assert within % layout.ep.size() == layout.ep.rank(), "not Megatron's rank order"
        self._joins = layout.dp_cp.rank() == 0  # one replica of a stage gathers
        assert self._joins == (within < layout.tp.size()), "not Megatron's rank order"
        self._held: dict[tuple[str, ...], torch.nn.Parameter] = {}  # by the Hugging Face tensors they are made of
        experts = spec.experts_of(layout.ep.rank(), layout.ep.size()).start
        for chunk in policy.chunks:
            for local, parameter in chunk.named_parameters():
                name = global_name(local, chunk.layer_offset, experts)
                if not (name == OUTPUT_LAYER and spec.tied):
                    self._held[huggingface_names(spec, name)] = parameter

    @torch.no_grad()
    def gather(self, number: int) -> dict[str, torch.Tensor] | None:
        """What this rank sends in round `number`, by Hugging Face name, on the parameters' device; None where it does
        not send. A collective over the tensor-parallel ranks that hold a dense bucket.

        Tensors may share memory with the parameters.
        """
        bucket = self._schedule.bucket_of(self._layout.rank, number)
        together = self._schedule.dense_bucket(self._layout.pp.rank(), number) if self._joins else None
        shards: dict[str, list[torch.Tensor]] = {}
        if together is not None and self._layout.tp.size() > 1:
            shards = self._collect(together)
        if bucket is None:
            return None
        tensors: dict[str, torch.Tensor] = {}
        for name in bucket.parameters:
            tensors |= to_huggingface(self._spec, name, shards.get(name) or [self._parameter(name)])
        if self._schedule.quantization is not None:
            tensors = quantize_tensors(tensors)
        assert tuple(tensors) == bucket.names, "not the schedule's tensors"
        return tensors

    def _collect(self, bucket: Bucket) -> dict[str, list[torch.Tensor]]:
        """Of every sharded parameter the shards, on the bucket's sender: one gather for all of them."""
        names = [name for name in bucket.parameters if is_sharded(name)]
        if not names:
            return {}
        group = self._layout.tp
        own = [self._parameter(name) for name in names]
        flat = torch.cat([parameter.reshape(-1) for parameter in own])
        leads = group.rank() == 0
        parts = [torch.empty_like(flat) for _ in range(group.size())] if leads else None
        dist.gather(flat, parts, group=group, group_dst=0)
        if not leads:
            return {}
        cut = [part.split([parameter.numel() for parameter in own]) for part in parts]
        return {
            name: [pieces[i].view(own[i].shape) for pieces in cut]  # a shard has the same shape on every rank
            for i, name in enumerate(names)
        }

    def _parameter(self, name: str) -> torch.Tensor:
        return self._held[huggingface_names(self._spec, name)].detach()
