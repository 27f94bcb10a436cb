"""The calls of memory release and resume, to a server on a CPU that frees nothing by them."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from dynamo_megatron.resharding.memory import MemoryTurns, Moved, memory_metrics
from dynamo_megatron.resharding.server_api import call
from dynamo_megatron.rollout.endpoint import Endpoint


@pytest.fixture
def alone(tmp_path):
    """A layout of this one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield SimpleNamespace(host=dist.group.WORLD)
    dist.destroy_process_group()


@pytest.fixture
def turns(alone):
    """(MemoryTurns without a training side, what it said)."""
    said = []
    turns = MemoryTurns(SimpleNamespace(layout=alone), said.append)
    turns._offload = SimpleNamespace(release=lambda parts: 10, resume=lambda parts: 7)
    return turns, said


@pytest.mark.full
def test_a_server_goes_through_all_phases_and_answers(sglang_server, turns):
    turns, said = turns
    turns.know([sglang_server.endpoint])
    request = {"input_ids": [10, 20, 30], "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    before = call(sglang_server.endpoint, "/generate", request, 60)["output_ids"]
    for phase in ("weights", "weights", "generate", "weights", "train", "weights", "generate", "save", "generate"):
        turns.enter(phase)
        lacking = turns._released[sglang_server.endpoint]
        assert ("weights" in lacking) == (phase == "train") and ("kv_cache" in lacking) == (phase != "generate")
    assert call(sglang_server.endpoint, "/generate", request, 60)["output_ids"] == before and said == []


def test_a_server_that_is_gone_is_told_of_and_a_restarted_one_lacks_nothing(turns):
    turns, said = turns
    gone = Endpoint("server-0", 1, "http://127.0.0.1:9", 1, "")
    turns.know([gone])
    turns.enter("train")
    assert len(said) == 1 and said[0].startswith("server-0 did not release its memory: /release_memory_occupation")
    turns.know([Endpoint("server-0", 2, "http://127.0.0.1:9", 1, "")])
    turns.enter("generate")
    assert len(said) == 1
    moved = turns.report()
    assert moved.released == 20 and moved.resumed == 14 and turns.report() == Moved()
    metrics = memory_metrics([moved, Moved(seconds=9.0, released=5)])
    assert metrics["memory/released_bytes"] == 25 and metrics["time/memory"] == 9.0
