"""Memory that the training side releases and takes again: the updates after it are the same bits."""

from concurrent.futures import wait
from threading import Event

import pytest
import torch
from layout_cases import rollouts, weights_of
from rank_cases import run_cases, settings

pytestmark = pytest.mark.full


def on_rank(case, config, layout) -> dict:
    straight, moved = (trained(config, layout, moved) for moved in (False, True))
    equal = all(map(torch.equal, straight.pop("weights"), weights := moved.pop("weights")))
    return {"equal": equal, "parameters": sum(p.numel() for p in weights), **moved}


def trained(config, layout, moved: bool) -> dict:
    from dynamo_megatron.models import load_model_config
    from dynamo_megatron.policy.batch import TrainBatch
    from dynamo_megatron.policy.offload import PARTS, Offload
    from dynamo_megatron.policy.policy import Policy

    policy = Policy(load_model_config(config.model.path), config, layout)
    offload, data, seen = Offload(policy), TrainBatch.build(rollouts(100, 7, None), config), {}
    offload.allocate_ahead()
    for step in range(3):
        if moved and step:  # before the first update there is no optimizer state but the main weights
            freed = {part: offload.release([part]) for part in PARTS}
            seen = {"freed": freed, "again": offload.release(PARTS)}
            seen["resident"] = sum(p.untyped_storage().nbytes() for p in policy.chunks[0].parameters())
            seen["weights first"] = offload.resume(["weights"])
        mini_batches = policy.pack(data.rollouts, data.mini_batches)
        stats = policy.token_stats(data.rollouts, mini_batches)
        if moved and step:
            seen["taken"] = offload.resume(PARTS)
        policy.update(data, mini_batches[0], stats, None, 1e-3)
    seen["allocated in vain"] = sum(map(len, offload._ahead.values())) if moved else 0
    return {"weights": weights_of(policy), **seen}


def test_updates_after_a_release_are_the_same_bits(make_tiny_model, tmp_path):
    """Tied in bfloat16, and experts in float32, where the main weights are the weights."""
    cases = []
    for family, dtype in (("llama", "bfloat16"), ("qwen3_moe", "float32")):
        path = make_tiny_model(tmp_path / family, family, dtype=dtype, tied=family == "llama")
        config = settings(path, {}, trainer={"micro_batch_tokens": 64}) | {"model": {"path": str(path), "dtype": dtype}}
        cases.append({"config": config, "ranks": 1})
    for (got,), size in zip(run_cases(__file__, cases, tmp_path), (2, 4), strict=True):
        freed, n = got["freed"], got["parameters"]
        assert got["equal"] and got["resident"] == 0 and got["again"] == got["allocated in vain"] == 0
        # weights, two moments and, in bfloat16, main weights in float32, gradients in float32; buffers are padded
        assert size * n <= freed["weights"] <= 1.1 * size * n
        assert (8 if size == 4 else 12) * n <= freed["optimizer"] <= 1.1 * 12 * n
        assert 4 * n <= freed["gradients"] <= 1.1 * 4 * n
        assert got["weights first"] == freed["weights"] and got["taken"] == freed["optimizer"] + freed["gradients"]


def test_close_waits_for_the_allocation_under_way(monkeypatch):
    from dynamo_megatron.policy import offload

    begun, closing, allocated = Event(), Event(), []

    def allocate(size):
        begun.set(), closing.wait(), allocated.append(size)

    monkeypatch.setattr(offload, "_host_memory", allocate)
    monkeypatch.setattr(offload, "wait", lambda due: (closing.set(), wait(due)))
    memory = offload.Offload(None)
    monkeypatch.setattr(memory, "_storages", lambda part: [torch.empty(8).untyped_storage()])
    monkeypatch.setattr(memory, "_optimizers", list)
    memory.allocate_ahead(), begun.wait(), memory.close()
    assert allocated == [32]  # the second was cancelled
