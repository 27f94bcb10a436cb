"""Which transport is used when, what is refused, and the buffers: without servers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dynamo_megatron.config.rollout import RolloutConfig
from dynamo_megatron.rollout.servers.server_api import Endpoint, ServerError
from dynamo_megatron.runtime.threads import for_each
from dynamo_megatron.weight_sync.transports import check_segments, check_transport, choose_transport, handles
from dynamo_megatron.weight_sync.transports.base import FlatBuffer
from dynamo_megatron.weight_sync.transports.handles import TensorTransport

GONE = Endpoint("server-0", 1, "http://127.0.0.1:9", 1, "")
CPU, GPU, TWO_HOSTS = (False, 1), (True, 1), (False, 2)
COLOCATED = {}
SPLIT = {"placement": "split", "host": "192.0.2.7"}
ELSEWHERE = {"placement": "external", "urls": ["http://192.0.2.1:80"]}
HERE = {"placement": "external", "urls": ["http://127.0.0.1:80", "http://localhost:81"]}


def config(transport="auto", **rollout) -> RolloutConfig:
    return RolloutConfig(sync={"transport": transport}, **rollout)


@pytest.mark.parametrize(
    ("transport", "rollout", "machine", "chosen"),
    [
        ("auto", COLOCATED, CPU, "tensor"),
        ("auto", COLOCATED, TWO_HOSTS, "disk"),
        ("auto", COLOCATED, GPU, "ipc"),
        ("auto", SPLIT, GPU, "nccl"),
        ("auto", SPLIT, CPU, "disk"),
        ("auto", HERE, CPU, "tensor"),
        ("auto", ELSEWHERE, CPU, "disk"),
        ("gloo", COLOCATED, CPU, "gloo"),
        ("nccl", COLOCATED, GPU, ValueError("two ranks on one GPU")),
        ("nccl", ELSEWHERE, CPU, ValueError("needs GPUs")),
        ("ipc", COLOCATED, CPU, ValueError("needs GPUs")),
        ("ipc", ELSEWHERE, GPU, ValueError("needs servers on the trainer's GPUs")),
        ("tensor", ELSEWHERE, CPU, ValueError("one host's memory")),
        ("tensor", COLOCATED, TWO_HOSTS, ValueError("one host's memory")),
        ("tensor", COLOCATED, GPU, ValueError("is for servers on the CPU; use ipc")),
    ],
)
def test_the_transport_of_a_placement(transport, rollout, machine, chosen):
    if isinstance(chosen, str):
        assert choose_transport(config(transport, **rollout), *machine) == chosen
    else:
        with pytest.raises(ValueError, match=f"rollout.sync.transport: {transport} .*{chosen}"):
            choose_transport(config(transport, **rollout), *machine)


def test_ipc_and_offloading_refuse_expandable_segments(monkeypatch):
    check_segments("rollout.offload")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments : True")
    with pytest.raises(ValueError, match="expandable_segments out of PYTORCH_CUDA_ALLOC_CONF"):
        check_segments("rollout.offload")


@pytest.mark.parametrize(("transport", "rollout"), [("ipc", COLOCATED), ("nccl", SPLIT)])
def test_servers_with_another_version_are_refused(tmp_path, monkeypatch, transport, rollout):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 7))
    python = tmp_path / "python"
    rollout = rollout | {"python": str(python), "offload": False}
    ours = torch.__version__ if transport == "ipc" else "2.27.7"
    for prints, said in (
        (ours, None),
        ("1.0.0", f"on both sides: .*, 1.0.0 in {python}"),
        ("", "on both sides: .*, none in "),
    ):
        python.write_text(f"#!/bin/sh\necho {prints}\n")
        python.chmod(0o755)
        if said is None:
            assert check_transport(config(transport, **rollout)) == transport
        else:
            with pytest.raises(ValueError, match=said):
                check_transport(config(transport, **rollout))


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


def test_what_servers_read_stays_until_the_next_turn():
    transport = TensorTransport()
    transport.stage(0, {"a": torch.randn(1000, 100)})
    transport.turn(0, [], None, [])
    transport.stage(1, {"b": torch.zeros(7)})
    assert [tensor.name for tensor in transport._buffer.tensors] == ["a"]
    transport.turn(0, [], None, [])
    assert [tensor.name for tensor in transport._buffer.tensors] == ["b"]
    transport.end()


def test_a_send_that_failed_leaves_no_shared_memory():
    before = {segment.name for segment in Path("/dev/shm").iterdir()}
    transport = TensorTransport()
    for size in (100, 1000):  # the first one's buffer is too small for the second
        transport.stage(0, {"a": torch.randn(size)})
        transport.turn(0, [], None, [])
        with pytest.raises(ServerError):
            transport.send(GONE)
    transport.end()
    left = {segment.name for segment in Path("/dev/shm").iterdir()} - before
    assert not [name for name in left if name.startswith(f"torch_{os.getpid()}_")]


SHARES = """
import os, psutil, signal, torch
from dynamo_megatron.weight_sync.transports.handles import TensorTransport

transport = TensorTransport()
transport.stage(1, {"weight": torch.zeros(4)})
managers = [c for c in psutil.Process().children(recursive=True) if "torch_shm_manager" in " ".join(c.cmdline())]
for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
    for manager in managers:
        manager.send_signal(number)
print(len(managers), transport.stage(2, {"weight": torch.zeros(4096)}))
transport.end()
"""


def test_a_sync_outlives_signals_to_all_processes_of_a_job():
    """SLURM sends the signals that ask the ranks to stop to what torch has started, too."""
    done = subprocess.run([sys.executable, "-P", "-c", SHARES], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["1", "16384"], done.stderr


FULL = "mount -t tmpfs -o size=1m none /dev/shm && exec "
ASKS = "from dynamo_megatron.weight_sync.transports.handles import _shared; _shared(2 << 20)"


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounts a /dev/shm of 1 MiB: as root")
def test_a_full_dev_shm_is_named_in_one_line():
    isolated = ["unshare", "--mount", "--propagation", "private", "sh", "-c", FULL + '"$0" -P -c "$1"']
    done = subprocess.run([*isolated, sys.executable, ASKS], capture_output=True, text=True, timeout=120)
    assert done.stderr.splitlines()[-1].startswith("OSError: /dev/shm has no room for 2.10 MB of weights"), done.stderr


def test_ipc_without_a_servers_gpus_is_that_servers_failure(monkeypatch):
    """A server with GPUs that this process has not, and one that does not say which it has."""
    monkeypatch.setattr(handles, "_uuid", ["a", "b"].__getitem__)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    said = {"server-0": (1, 1), "server-1": (1, 1), "server-2": None}

    def call_for(endpoint, *_):
        if said[endpoint.name] is None:
            raise ServerError("/server_info said nothing of base_gpu_id")
        return said[endpoint.name]

    monkeypatch.setattr(handles, "call_for", call_for)
    transport = handles.IpcTransport(SimpleNamespace(local_rank=1, rank=0, gather=lambda value: [value]))
    servers = [Endpoint(name, 1, "http://127.0.0.1:9", tp, "") for name, tp in zip(said, (1, 2, 1), strict=True)]
    transport._locate(servers)
    assert [transport._ranks[server] for server in servers] == [[0], [], []]
    with pytest.raises(ServerError, match="not those of training ranks"):
        transport.send(servers[1])


def test_threads_tell_failures_from_faults_of_ours():
    def work(n):
        if n == 1:
            raise OSError("gone\naway")
        return 10 * n

    assert for_each([0, 1, 2], work, None) == ([(0, 0), (2, 20)], [(1, "gone away")])
    with pytest.raises(ZeroDivisionError):
        for_each([0], lambda n: 1 // n, None)
