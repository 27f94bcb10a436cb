"""Each rank's place in the layout: the process group, Megatron's parallel groups, and reductions over them."""

from __future__ import annotations

import datetime
import math
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from dynamo_megatron.config import Config, ParallelConfig
from dynamo_megatron.runtime.listening import gloo_listens_on, ranks_address


@dataclass(frozen=True)
class Layout:
    """This rank's place. Groups are always taken from here, never looked up elsewhere."""

    rank: int
    world_size: int
    local_rank: int
    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    cp: dist.ProcessGroup
    dp: dist.ProcessGroup
    dp_cp: dist.ProcessGroup  # the ranks that hold the same parameters, except experts
    ep: dist.ProcessGroup
    host: dist.ProcessGroup  # all ranks, for CPU tensors and objects; so are the next two groups
    node: dist.ProcessGroup  # the ranks of this node
    leaders: dist.ProcessGroup | None  # the first ranks of all nodes; None on other ranks, or if there is one node

    @property
    def is_first_stage(self) -> bool:
        return self.pp.rank() == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp.rank() == self.pp.size() - 1

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.local_rank) if torch.cuda.is_available() else torch.device("cpu")

    def world_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sums CPU tensors over one rank of each data- and context-parallel share, in place and on every rank."""
        if not (self.is_last_stage and self.tp.rank() == 0):
            values.zero_()
        dist.all_reduce(values, group=self.host)
        return values

    def gather(self, value: Any) -> list[Any]:
        """Returns the plain data of every rank, in rank order; collective over all ranks."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.host)
        return values


def join_ranks(config: Config, store: dist.Store) -> Layout:
    """Creates the process group over `store` and Megatron's groups. Reads the variables that launchers set."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(local_rank)
    timeout = datetime.timedelta(seconds=config.trainer.timeout)
    with gloo_listens_on(ranks_address()):
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=dist.PrefixStore("process_group", store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
        minutes = math.ceil(config.trainer.timeout / 60)
        groups = parallel_groups(config.parallel, create_gloo_process_groups=True, distributed_timeout_minutes=minutes)
        host = dist.new_group(backend="gloo", timeout=timeout) if cuda else dist.group.WORLD
        node, leaders = _node_groups(rank - local_rank, host, timeout)
    tensor_parallel.model_parallel_cuda_manual_seed(config.seed, force_reset_rng=True)
    place = {"rank": rank, "world_size": world_size, "local_rank": local_rank}
    return Layout(**place, **groups, host=host, node=node, leaders=leaders)


def parallel_groups(p: ParallelConfig, **options: Any) -> dict[str, dist.ProcessGroup]:
    """Makes Megatron's groups, and returns those that a Layout has by their names there."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=p.tp,
        pipeline_model_parallel_size=p.pp,
        virtual_pipeline_model_parallel_size=p.vpp if p.vpp > 1 else None,
        context_parallel_size=p.cp,
        expert_model_parallel_size=p.ep,
        expert_tensor_parallel_size=1,
        **options,
    )
    return {
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "cp": parallel_state.get_context_parallel_group(),
        "dp": parallel_state.get_data_parallel_group(),
        "dp_cp": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "ep": parallel_state.get_expert_model_parallel_group(),
    }


def _node_groups(
    first: int, host: dist.ProcessGroup, timeout: datetime.timedelta
) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """Returns `Layout.node` and `Layout.leaders`. `first`: the first rank of this rank's node."""
    firsts = [0] * host.size()
    dist.all_gather_object(firsts, first, group=host)
    nodes = [[rank for rank, number in enumerate(firsts) if number == node] for node in dict.fromkeys(firsts)]
    if len(nodes) == 1:
        return host, None
    node, _ = dist.new_subgroups_by_enumeration(nodes, timeout=timeout, backend="gloo")
    leaders = dist.new_group([ranks[0] for ranks in nodes], timeout=timeout, backend="gloo")
    return node, leaders if node.rank() == 0 else None
