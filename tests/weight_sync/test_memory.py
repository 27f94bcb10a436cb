"""The calls of memory release and resume, to a server on a CPU that frees nothing by them."""

import asyncio
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from dynamo_megatron.rollout.servers.server_api import Endpoint, call
from dynamo_megatron.runtime.threads import Call
from dynamo_megatron.weight_sync.memory import DeviceMemory


@pytest.fixture
def turns(tmp_path):
    """(DeviceMemory of this one rank without a training side, which servers it had restarted)."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    lost, alone = {}, SimpleNamespace(host=dist.group.WORLD)
    nothing = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[], state={}))
    config = SimpleNamespace(optimizer=SimpleNamespace(cpu_offload=False))
    policy = SimpleNamespace(layout=alone, chunks=[], optimizer=nothing, config=config)
    turns = DeviceMemory(policy, SimpleNamespace(condemn=lost.update))
    turns._offloads = [SimpleNamespace(release=lambda parts: 10, resume=lambda parts: 7)]
    yield turns, lost
    dist.destroy_process_group()


@pytest.mark.full
def test_a_server_goes_through_all_phases_with_requests_under_way(sglang_server, turns):
    """An abort returns before the requests have ended; SGLang dies of a release then."""
    turns, lost = turns
    asyncio.run(sglang_server.release_caches())  # as after its start
    turns.set_servers([sglang_server.endpoint])
    sampling = {"temperature": 0, "max_new_tokens": 1900, "ignore_eos": True}
    request = {"input_ids": [10, 20, 30], "sampling_params": sampling}
    turns.enter("generate")
    before = call(sglang_server.endpoint, "/generate", request, 60)["output_ids"]
    running = [Call(call, sglang_server.endpoint, "/generate", request, 60) for _ in range(8)]
    for phase in ("update", "weight sync", "generate", "save", "generate"):
        turns.enter(phase)
        lacking = turns._released[sglang_server.endpoint]
        assert ("weights" in lacking) == (phase == "update") and ("kv_cache" in lacking) == (phase != "generate")
    assert all(one.result()["meta_info"]["finish_reason"]["type"] in ("abort", "length") for one in running)
    assert call(sglang_server.endpoint, "/generate", request, 60)["output_ids"] == before and lost == {}


def test_a_server_that_is_gone_is_restarted_and_a_new_one_lacks_its_caches(turns):
    turns, lost = turns
    gone = Endpoint("server-0", 1, "http://127.0.0.1:9", 1, "")
    turns.set_servers([gone])
    turns.enter("update")
    assert list(lost) == [gone]
    assert lost.pop(gone).startswith("it did not release its memory: /release_memory_occupation: no answer")
    turns.set_servers([again := Endpoint("server-0", 2, "http://127.0.0.1:9", 1, "")])
    assert turns._released[again] == {"kv_cache", "cuda_graph"}
    turns.enter("weight sync")
    assert lost == {}
    assert turns.take_seconds() > 0 and turns.take_seconds() == 0
