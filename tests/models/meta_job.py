"""One rank of any layout in one process: a fake process group, and models on the meta device."""

from dynamo_megatron.policy import backend

backend.enable_cpu()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from dynamo_megatron.policy.layout import Layout, parallel_groups  # noqa: E402


class MetaLayout(Layout):
    device = torch.device("meta")


def join_as(rank, world_size, p):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    groups = parallel_groups(p, create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(0, force_reset_rng=True)
    place, world = {"rank": rank, "world_size": world_size, "local_rank": 0}, dist.group.WORLD
    return MetaLayout(**place, **groups, host=world, node=world, leaders=None)


def leave():
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
