"""Which transport is used when, what is refused, and what a payload is made of: without servers."""

import base64
import io
import os
import pickle
import sys
import time
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dynamo_megatron.config.rollout import RolloutConfig
from dynamo_megatron.rollout.servers.endpoint import Endpoint
from dynamo_megatron.rollout.servers.server_api import ServerError
from dynamo_megatron.runtime.threads import Call, for_each
from dynamo_megatron.weight_sync.transports import (
    Machine,
    check_segments,
    check_torch,
    check_transport,
    choose_transport,
    ipc,
    is_local,
)
from dynamo_megatron.weight_sync.transports.flat import FlatBuffer
from dynamo_megatron.weight_sync.transports.group import JOIN_TIMEOUT, GroupTransport
from dynamo_megatron.weight_sync.transports.ipc import _Pickler
from dynamo_megatron.weight_sync.transports.tensor import TensorTransport

GONE = Endpoint("server-0", 1, "http://127.0.0.1:9", 1, "")
CPU, GPU, TWO_HOSTS = Machine(cuda=False, hosts=1), Machine(cuda=True, hosts=1), Machine(cuda=False, hosts=2)
ELSEWHERE = {"placement": "external", "urls": ["http://192.0.2.1:80"]}
HERE = {"placement": "external", "urls": ["http://127.0.0.1:80", "http://localhost:81"]}


def config(transport="auto", **rollout) -> RolloutConfig:
    return RolloutConfig(sync={"transport": transport}, **rollout)


@pytest.mark.parametrize(
    ("rollout", "machine", "chosen"),
    [
        ({}, CPU, "tensor"),
        ({}, TWO_HOSTS, "disk"),
        ({}, GPU, "ipc"),
        ({"placement": "split", "host": "192.0.2.7"}, GPU, "nccl"),
        ({"placement": "split", "host": "192.0.2.7"}, CPU, "disk"),
        (HERE, CPU, "tensor"),
        (ELSEWHERE, CPU, "disk"),
    ],
)
def test_auto(rollout, machine, chosen):
    assert choose_transport(config(**rollout), machine) == chosen


@pytest.mark.parametrize(
    ("transport", "rollout", "machine", "reason"),
    [
        ("nccl", {}, GPU, "two ranks on one GPU"),
        ("nccl", ELSEWHERE, CPU, "needs GPUs"),
        ("ipc", {}, CPU, "needs GPUs"),
        ("ipc", ELSEWHERE, GPU, "needs servers on the trainer's GPUs"),
        ("tensor", ELSEWHERE, CPU, "one host's memory"),
        ("tensor", {}, TWO_HOSTS, "one host's memory"),
        ("tensor", {}, GPU, "is for servers on the CPU; use ipc"),
    ],
)
def test_refused(transport, rollout, machine, reason):
    with pytest.raises(ValueError, match=f"rollout.sync.transport: {transport} .*{reason}") as error:
        choose_transport(config(transport, **rollout), machine)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("transport", ["gloo", "disk", "tensor"])
def test_asked_for_and_possible(transport):
    assert choose_transport(config(transport), CPU) == transport


def test_ipc_and_released_memory_refuse_expandable_segments(monkeypatch):
    check_segments("rollout.offload")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments : True")
    with pytest.raises(ValueError, match="expandable_segments out of PYTORCH_CUDA_ALLOC_CONF"):
        check_segments("rollout.offload")


def test_nccl_refuses_another_nccl(tmp_path, monkeypatch):
    """By an interpreter whose torch has 2.28.3."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "cuda.py").write_text("class nccl:\n    version = staticmethod(lambda: (2, 28, 3))\n")
    (tmp_path / "torch" / "__init__.py").write_text("from torch import cuda\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    split = {"placement": "split", "host": "192.0.2.7", "python": str(python)}
    for ours in ((2, 28, 3), (2, 27, 7)):
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda ours=ours: ours)
        assert check_transport(config("gloo", **split)) == "gloo"
        assert check_transport(config("nccl", placement="external", urls=["http://192.0.2.1:80"])) == "nccl"
        if ours == (2, 28, 3):
            assert check_transport(config(**split)) == "nccl"
    said = rf"NCCL on both sides: 2\.27\.7 in .*, 2\.28\.3 in {python}; .* gloo"
    with pytest.raises(ValueError, match=said) as error:
        check_transport(config(**split))
    assert "\n" not in str(error.value)


def test_ipc_refuses_another_torch(tmp_path):
    check_torch(config())
    check_torch(config(python=sys.executable))
    mend = r"needs one version of torch.*; \S+ -m pip install torch==1\.0\.0 \(docs/install\.md\)"
    for says, message in (("1.0.0+cu130", mend), ("", "has no torch")):
        other = tmp_path / f"python{says}"
        other.write_text(f"#!/bin/sh\necho {says}\n")
        other.chmod(0o755)
        with pytest.raises(ValueError, match=message) as error:
            check_torch(config(python=str(other)))
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="does not tell its version of torch"):
        check_torch(config(python=str(tmp_path / "missing")))


def test_addresses():
    assert is_local("http://127.0.0.1:1") and is_local("http://localhost:1")
    assert not is_local("http://192.0.2.1:1")
    assert not is_local("http://no-such-host.invalid:1")


def test_a_flat_buffer_is_the_tensors_end_to_end_and_is_used_again():
    made = []
    buffer = FlatBuffer(lambda n: made.append(n) or torch.empty(n, dtype=torch.uint8))
    first = {"a": torch.randn(3, 2).T, "b": torch.randn(5)}  # the first is not contiguous
    for tensors in (first, {"c": torch.randn(2)}, {"d": torch.randn(40)}):
        buffer.fill(tensors)
        assert [t.name for t in buffer.tensors] == list(tensors)
        for t in buffer.tensors:
            assert torch.equal(buffer.used[t.start_idx : t.end_idx].view(t.dtype).view(t.shape), tensors[t.name])
    assert made == [44, 160]
    assert buffer.description() == {"names": ["d"], "dtypes": ["float32"], "shapes": [[40]]}


def test_a_handle_is_small_and_names_only_what_sglang_lets_in():
    transport = TensorTransport()
    transport.stage(0, {"a": torch.randn(1000, 100)})
    raw = base64.b64decode(transport._handle())
    assert len(raw) < 2000
    seen = []

    class Names(pickle.Unpickler):
        def find_class(self, module, name):
            seen.append((module, name))
            return super().find_class(module, name)

    bucket = Names(io.BytesIO(raw)).load()
    assert torch.equal(bucket["flattened_tensor"], transport._buffer.used)
    safe = {("torch.multiprocessing.reductions", "rebuild_tensor"), ("types", "SimpleNamespace"), ("torch", "Size")}
    assert safe <= set(seen)
    assert not [module for module, _ in seen if module.startswith(("sglang", "dynamo_megatron"))]
    transport.end()


def test_a_send_that_failed_leaves_no_shared_memory():
    before = {segment.name for segment in Path("/dev/shm").iterdir()}
    transport = TensorTransport()
    for size in (100, 1000):  # the first one's buffer is too small for the second
        transport.stage(0, {"a": torch.randn(size)})
        with pytest.raises(ServerError):
            transport.send(GONE)
    transport.end()
    left = {segment.name for segment in Path("/dev/shm").iterdir()} - before
    assert not [name for name in left if name.startswith(f"torch_{os.getpid()}_")]


def test_a_server_that_refuses_a_group_is_not_waited_for():
    transport, started = GroupTransport("gloo", torch.device("cpu")), time.monotonic()
    with pytest.raises(ServerError, match="/init_weights_update_group: no answer"):
        transport.connect(GONE)
    assert time.monotonic() - started < JOIN_TIMEOUT / 4
    assert len(transport._left[GONE.name]) == 1, "it may have its end of the group: it is asked to leave it"
    transport.close()


def test_ipc_without_a_servers_gpus_is_that_servers_failure(monkeypatch):
    """A server with GPUs that this process has not, and one that does not say which it has."""
    monkeypatch.setattr(ipc, "_uuid", ["a", "b"].__getitem__)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    said = {"server-0": (1, 1), "server-1": (1, 1), "server-2": None}

    def call_for(endpoint, *_):
        if said[endpoint.name] is None:
            raise ServerError("/server_info said nothing of base_gpu_id")
        return said[endpoint.name]

    monkeypatch.setattr(ipc, "call_for", call_for)
    transport = ipc.IpcTransport(SimpleNamespace(local_rank=1, rank=0, gather=lambda value: [value]))
    servers = [Endpoint(name, 1, "http://127.0.0.1:9", tp, "") for name, tp in zip(said, (1, 2, 1), strict=True)]
    transport._locate(servers)
    assert [transport._ranks[server] for server in servers] == [[0], [], []]
    with pytest.raises(ServerError, match="not those of training ranks"):
        transport.send(servers[1])


def test_the_pickler_of_cuda_tensors_leaves_cpu_tensors_to_torch():
    tensor = {"t": torch.arange(4.0).share_memory_()}
    ours, theirs = io.BytesIO(), io.BytesIO()
    _Pickler(ours).dump(tensor)
    ForkingPickler(theirs).dump(tensor)
    assert torch.equal(pickle.loads(ours.getvalue())["t"], tensor["t"])
    assert torch.equal(pickle.loads(theirs.getvalue())["t"], tensor["t"])


def test_threads_tell_failures_from_faults_of_ours():
    def work(n):
        if n == 1:
            raise OSError("gone\naway")
        return 10 * n

    polls = []
    done, failed = for_each([0, 1, 2], work, lambda: polls.append(1))
    assert done == [(0, 0), (2, 20)] and failed == [(1, "gone away")]
    with pytest.raises(ZeroDivisionError):
        for_each([0], lambda n: 1 // n, None)
    with pytest.raises(ZeroDivisionError):
        Call(lambda: 1 // 0).result()
