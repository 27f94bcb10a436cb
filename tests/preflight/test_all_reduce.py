"""The sums over all ranks, and what is said of them."""

import pytest
import torch
import torch.distributed as dist

from dynamo_megatron.preflight import all_reduce, device_checks


def test_the_ranks_add_over_gloo_beside_nccl(monkeypatch, capsys):
    """On a GPU that is none: what its tensors are added with."""
    full, backends, added = torch.full, [], []
    gpu = {"is_available": True, "set_device": None, "mem_get_info": (1, 1), "get_device_name": "GPU"}
    for name, value in (gpu | {"get_device_capability": (9, 0), "synchronize": None}).items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch, "ones", lambda *shape, **_: full(shape, 1.0))
    monkeypatch.setattr(torch, "full", lambda shape, value, device: added.append(device.type) or full(shape, value))
    monkeypatch.setattr(all_reduce, "connect_store", lambda timeout: None)
    monkeypatch.setattr(all_reduce, "ranks_address", lambda: "127.0.0.1")
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: backends.append(backend))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.mul_(2))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    all_reduce.main()
    assert backends == ["cpu:gloo,cuda:nccl"] and added == ["cuda", "cpu"]
    assert '"nccl": {"sum": 2.0' in (said := capsys.readouterr().out) and '"gloo": {"sum": 2.0' in said


@pytest.mark.parametrize("wrong", ["nccl", "gloo"])
def test_a_wrong_sum_names_how_it_went(check, monkeypatch, wrong):
    sums = {name: {"sum": 2.0 if name == wrong else 1.0, "seconds": 0.1, "bytes": 4} for name in ("nccl", "gloo")}
    report = {"rank": 0, "world_size": 1, "device": "GPU", "expected": 1.0, "sums": sums}
    monkeypatch.setattr(device_checks, "_run_ranks", lambda environments: [report])
    (failed, ok) = check("devices")
    assert failed[0] == "FAILED" and f"has 2.0 instead of 1.0 over {wrong}" in failed[1]
    assert ok[1].endswith("nccl: 0 MB in 100.0 ms, gloo: 0 MB in 100.0 ms")
