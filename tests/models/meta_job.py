"""One rank of any layout in one process: a fake process group, and models on the meta device."""

from dynamo_megatron.policy import backend

backend.enable_cpu()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from dynamo_megatron.policy.layout import Layout  # noqa: E402


class MetaLayout(Layout):
    device = torch.device("meta")


def join_as(rank, world_size, p):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=p.tp,
        pipeline_model_parallel_size=p.pp,
        virtual_pipeline_model_parallel_size=p.vpp if p.vpp > 1 else None,
        context_parallel_size=p.cp,
        expert_model_parallel_size=p.ep,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(0, force_reset_rng=True)
    return MetaLayout(
        rank=rank,
        world_size=world_size,
        local_rank=0,
        tp=parallel_state.get_tensor_model_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        cp=parallel_state.get_context_parallel_group(),
        dp=parallel_state.get_data_parallel_group(),
        dp_cp=parallel_state.get_data_parallel_group(with_context_parallel=True),
        ep=parallel_state.get_expert_model_parallel_group(),
        host=dist.group.WORLD,
        node=dist.group.WORLD,
        leaders=None,
    )


def leave():
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
