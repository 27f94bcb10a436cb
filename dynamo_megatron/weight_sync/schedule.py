"""Which rank gathers and sends which weights, computed once from the training layout and the same on every rank; and
the gathering: whole Hugging Face tensors on a bucket's sender, quantised where the schedule says so.

A *bucket* is a run of Megatron parameters of one pipeline stage (or, of experts, of one expert-parallel rank), at most
`bucket_bytes` of Hugging Face tensors. A parameter is never cut: q, k and v, and gate and up, which a server fuses,
travel together. In a *round* every sender has at most one bucket. With `quantization` names and bytes of a bucket are
those of what is sent, its bound is that of what is gathered.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dynamo_megatron.config import ParallelConfig
from dynamo_megatron.models import ModelSpec
from dynamo_megatron.models.adapters import is_adapter
from dynamo_megatron.models.fp8 import quantize_tensors, sent_bytes
from dynamo_megatron.models.mapping import (
    EMBEDDING,
    LAYER,
    OUTPUT_LAYER,
    cut,
    expert_number,
    global_name,
    huggingface_names,
    huggingface_shapes,
    is_expert,
    is_sharded,
    parameter_names,
    to_huggingface,
)
from dynamo_megatron.models.server_layout import server_shard

if TYPE_CHECKING:
    from dynamo_megatron.policy.lora import Adapter
    from dynamo_megatron.policy.policy import Policy


@dataclass(frozen=True)
class Bucket:
    """What one rank sends in one go."""

    number: int  # in the whole schedule
    sender: int  # a global rank
    parameters: tuple[str, ...]  # Megatron's, global
    names: tuple[str, ...]  # the Hugging Face tensors, and the scales, that they become, in order
    nbytes: int  # of those


@dataclass(frozen=True)
class SendSchedule:
    rounds: tuple[tuple[Bucket, ...], ...]
    stage_ranks: int  # ranks of a pipeline stage
    quantization: str | None  # as rollout.quantization

    @property
    def buckets(self) -> Iterator[Bucket]:
        return (bucket for buckets in self.rounds for bucket in buckets)

    @property
    def nbytes(self) -> int:
        """Of all tensors, once."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def tensors(self) -> frozenset[str]:
        """All names that are sent."""
        return frozenset(name for bucket in self.buckets for name in bucket.names)

    def bucket_of(self, rank: int, number: int) -> Bucket | None:
        """What `rank` sends in round `number`."""
        return next((bucket for bucket in self.rounds[number] if bucket.sender == rank), None)

    def dense_bucket(self, stage: int, number: int) -> Bucket | None:
        """What the tensor-parallel ranks of a stage gather together in round `number`."""
        bucket = self.bucket_of(stage * self.stage_ranks, number)
        return None if bucket is None or is_expert(bucket.parameters[0]) else bucket


def make_schedule(
    spec: ModelSpec,
    parallel: ParallelConfig,
    ranks: int,
    *,
    bucket_bytes: int,
    itemsize: int,
    quantization: str | None = None,
    only: Collection[str] | None = None,
) -> SendSchedule:
    """The schedule for `ranks` training ranks in Megatron's order (tp, cp, ep, dp, pp from the fastest to the slowest).

    `itemsize`: bytes of a value that is not quantised. `quantization`: rollout.quantization of the servers that get the
    weights. A parameter larger than `bucket_bytes` is a bucket of its own. `only`: the Megatron parameters that are
    sent; None: all.
    """
    stage_ranks = ranks // parallel.pp
    queues: dict[int, list[tuple[str, ...]]] = {}  # sender -> the parameters of each of its buckets
    sizes = {parameter: sum(tensors.values()) for parameter, tensors in _tensors(spec, itemsize, None).items()}
    sent = {p: t for p, t in _tensors(spec, itemsize, quantization).items() if only is None or p in only}
    for stage in range(parallel.pp):
        parameters = [p for p in sent if stage_of(p, spec, parallel) == stage]
        first = stage * stage_ranks  # tp 0, cp 0, dp 0 of the stage, and its ep 0 with expert-dp 0
        queues[first] = cut([p for p in parameters if not is_expert(p)], sizes, bucket_bytes)
        for ep in range(parallel.ep if spec.num_experts else 0):
            own = [p for p in parameters if expert_number(p) in spec.experts_of(ep, parallel.ep)]
            queues.setdefault(first + ep, []).extend(cut(own, sizes, bucket_bytes))
    rounds, number = [], 0
    for position in range(max(map(len, queues.values()))):
        buckets = []
        for sender in sorted(queues):
            if position < len(queues[sender]):
                parameters = queues[sender][position]
                names, nbytes = zip(*(tensor for p in parameters for tensor in sent[p].items()), strict=True)
                buckets.append(Bucket(number, sender, parameters, names, sum(nbytes)))
                number += 1
        rounds.append(tuple(buckets))
    return SendSchedule(tuple(rounds), stage_ranks, quantization)


def _tensors(spec: ModelSpec, itemsize: int, quantization: str | None) -> dict[str, dict[str, int]]:
    """Parameter -> the tensors that are sent of it, in order, and their bytes: without the padding."""
    shapes = huggingface_shapes(spec)
    return {
        parameter: {
            sent: nbytes
            for name in huggingface_names(spec, parameter)
            for sent, nbytes in sent_bytes(name, shapes[name], itemsize, quantization).items()
        }
        for parameter in parameter_names(spec)
    }


def stage_of(name: str, spec: ModelSpec, parallel: ParallelConfig) -> int:
    """The pipeline stage that sends parameter `name`; a tied head is the embedding."""
    if layer := LAYER.fullmatch(name):
        first = parallel.stage_layers(spec.num_layers)[0] // parallel.vpp  # layers of a chunk of any stage but the last
        return min(int(layer[1]) % (spec.num_layers // parallel.vpp) // first, parallel.pp - 1)
    return 0 if name == EMBEDDING else parallel.pp - 1


@functools.cache
def floor_bytes(
    spec: ModelSpec, tp: int, itemsize: int, quantization: str | None = None, only: frozenset[str] | None = None
) -> int:
    """Bytes that a server of `tp` ranks needs at least: every rank's own parameters, once, padding apart. `only`: the
    Hugging Face tensors that are counted; None: all.

    Key and value heads fewer than ranks are held more than once, and so are norms and routers.
    """
    total = 0
    for name, shape in huggingface_shapes(spec).items():
        if only is not None and name not in only:
            continue
        whole = torch.empty(shape, device="meta")
        for rank in range(tp):
            part = server_shard(spec, name, whole, rank, tp)
            total += sum(sent_bytes(name, part.shape, itemsize, quantization).values())
    return total


class BucketSource:
    """This rank's part in gathering. All ranks call `gather` for every round, in order."""

    def __init__(self, policy: Policy, schedule: SendSchedule):
        layout, spec = policy.layout, policy.spec
        self._spec, self.schedule, self._layout = spec, schedule, layout
        stage, within = divmod(layout.rank, schedule.stage_ranks)
        assert (stage, within % layout.tp.size()) == (layout.pp.rank(), layout.tp.rank()), "not Megatron's rank order"
        assert within % layout.ep.size() == layout.ep.rank(), "not Megatron's rank order"
        self._joins = layout.dp_cp.rank() == 0  # one replica of a stage gathers
        assert self._joins == (within < layout.tp.size()), "not Megatron's rank order"
        # By the Hugging Face tensors they are made of, with the adapter that is merged into what is sent.
        self._held: dict[tuple[str, ...], tuple[torch.nn.Parameter, Adapter | None]] = {}
        self._bridged = policy.chunks[0] if spec.bridged is not None else None  # bridge/source.py
        experts = spec.experts_of(layout.ep.rank(), layout.ep.size()).start
        for chunk in policy.chunks if self._bridged is None else ():
            adapters = chunk.adapters
            for local, parameter in chunk.named_parameters():
                if is_adapter(local):
                    continue
                name = global_name(local, chunk.layer_offset, experts)
                if not (name == OUTPUT_LAYER and spec.tied):
                    self._held[huggingface_names(spec, name)] = parameter, adapters.get(local)

    @torch.no_grad()
    def gather(self, number: int) -> dict[str, torch.Tensor] | None:
        """What this rank sends in round `number`, by Hugging Face name, on the parameters' device; None where it does
        not send. A collective over the tensor-parallel ranks that hold a dense bucket.

        Tensors may share memory with the parameters.
        """
        bucket = self.schedule.bucket_of(self._layout.rank, number)
        together = self.schedule.dense_bucket(self._layout.pp.rank(), number) if self._joins else None
        whole: dict[str, dict[str, torch.Tensor]] = {}
        if together is not None and self._bridged is not None:
            whole = {name: self._bridged.export(name) for name in together.parameters}
        elif together is not None and self._layout.tp.size() > 1:
            whole = {n: to_huggingface(self._spec, n, shards) for n, shards in self._collect(together).items()}
        if bucket is None:
            return None
        tensors: dict[str, torch.Tensor] = {}
        for name in bucket.parameters:
            tensors |= whole.get(name) or self._of_this_rank(name)
        if self.schedule.quantization is not None:
            tensors = quantize_tensors(tensors)
        assert tuple(tensors) == bucket.names, "not the schedule's tensors"
        return tensors

    def _collect(self, bucket: Bucket) -> dict[str, list[torch.Tensor]]:
        """Of every sharded parameter the shards, on the bucket's sender: one gather for all of them."""
        if not (names := [name for name in bucket.parameters if is_sharded(name)]):
            return {}
        group = self._layout.tp
        own = [self._parameter(name) for name in names]
        flat = torch.cat([parameter.reshape(-1) for parameter in own])
        leads = group.rank() == 0
        parts = [torch.empty_like(flat) for _ in range(group.size())] if leads else None
        dist.gather(flat, parts, group=group, group_dst=0)
        if not leads:
            return {}
        pieces = zip(*(part.split([parameter.numel() for parameter in own]) for part in parts), strict=True)
        # A shard has the same shape on every rank.
        return {n: [s.view(p.shape) for s in shards] for n, p, shards in zip(names, own, pieces, strict=True)}

    def _of_this_rank(self, name: str) -> dict[str, torch.Tensor]:
        if self._bridged is not None:
            return self._bridged.export(name)
        return to_huggingface(self._spec, name, [self._parameter(name)])

    def _parameter(self, name: str) -> torch.Tensor:
        parameter, adapter = self._held[huggingface_names(self._spec, name)]
        return parameter.detach() if adapter is None else adapter.merged(parameter.detach())
