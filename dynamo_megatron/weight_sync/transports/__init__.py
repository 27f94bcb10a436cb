"""Ways for weights to get from training ranks to servers, and which one is used when (docs/rollouts.md)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from urllib.parse import urlsplit

from dynamo_megatron.config.rollout import RolloutConfig
from dynamo_megatron.errors import InputError
from dynamo_megatron.rollout.servers.server import cuda_available, shares_memory
from dynamo_megatron.runtime.late import torch

VERSION_TIMEOUT = 120.0  # seconds for an interpreter to import torch
# What has to be the same version on both sides: CUDA IPC handles of another torch cannot be opened, and NCCL refuses a
# group of two versions, in the first sync.
VERSIONS = {
    "ipc": ("torch", lambda: torch.__version__, "torch.__version__"),
    "nccl": (
        "NCCL",
        lambda: ".".join(map(str, torch.cuda.nccl.version())),
        "'.'.join(map(str, torch.cuda.nccl.version()))",
    ),
}


def choose_transport(config: RolloutConfig, cuda: bool, hosts: int) -> str:
    """The transport of `rollout.sync.transport`, `auto` resolved. `cuda`: whether the training ranks have GPUs;
    `hosts`: that they run on. Raises ValueError, one line, where it cannot work."""
    name, here = config.sync.transport, config.host in ("127.0.0.1", "localhost", "lo")
    here = all(map(is_local, config.urls)) if config.placement == "external" else here
    near = hosts == 1 and (here or config.placement == "colocated")  # as far as the config tells
    on_gpu = "ipc" if config.placement == "colocated" else "nccl"
    if name == "auto":
        return on_gpu if cuda else "tensor" if near else "disk"
    refusals = {
        "ipc": [
            (not cuda, "needs GPUs; use tensor, gloo or disk"),
            (on_gpu != "ipc", f"needs servers on the trainer's GPUs, and placement is {config.placement}; use nccl"),
        ],
        "nccl": [
            (not cuda, "needs GPUs; use tensor, gloo or disk"),
            (on_gpu != "nccl", "cannot have two ranks on one GPU, and placement is colocated; use ipc"),
        ],
        "tensor": [
            (cuda, f"is for servers on the CPU; use {on_gpu}"),
            (not near, "goes through one host's memory, and not all ranks and servers are on it; use disk or gloo"),
        ],
    }
    for applies, reason in refusals.get(name, []):
        if applies:
            raise InputError(f"rollout.sync.transport: {name} {reason}")
    return name


def is_local(url: str) -> bool:
    """Whether a URL's host is an address of this one."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(urlsplit(url).hostname, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def check_transport(config: RolloutConfig) -> str:
    """The transport as far as one process knows it: the ranks' hosts are not known yet, so one (weight_sync/sync.py).
    Raises ValueError where it, offloading or quantised servers cannot work."""
    name = choose_transport(config, cuda_available(), hosts=1)
    if name == "ipc":
        check_segments("rollout.sync.transport: ipc")
    if name in VERSIONS:
        check_version(config, name)
    if shares_memory(config):
        check_segments("rollout.offload")
    check_quantization(config)
    return name


def check_segments(key: str) -> None:
    """Raises ValueError where memory is allocated in expandable segments, which neither CUDA IPC handles nor SGLang's
    memory saver (which servers inherit the variable for) can handle; `key` asks for one of these."""
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(variable, "").replace(" ", "").lower():
            raise InputError(f"{key} cannot go with expandable segments; take expandable_segments out of {variable}")


def check_quantization(config: RolloutConfig) -> None:
    """Raises ValueError where SGLang has no FP8 layers for this machine, or changes their weights when it has loaded
    them: the next weight sync would not fit. Servers on other nodes are taken to have GPUs like the ones here."""
    if config.quantization is None or config.engine != "sglang" or config.placement == "external":
        return
    key = f"rollout.quantization: {config.quantization}"
    if not cuda_available():
        raise InputError(
            f"{key} needs GPUs: on a CPU SGLang's FP8 layers are kernels for AMX, which CPU servers here do without; "
            "leave it out"
        )
    major, minor = torch.cuda.get_device_capability()
    # SGLang 0.5.23, layers/quantization/fp8.py: before 8.9 Marlin packs them, on 10.x DeepGEMM needs other scales.
    if (major, minor) < (8, 9) or major == 10:
        raise InputError(
            f"{key} needs a GPU of compute capability 8.9, 9.0 or from 11.0 on: on this one ({major}.{minor}) SGLang "
            "repacks the weights that it loads, and takes no others; leave it out"
        )


def check_version(config: RolloutConfig, transport: str) -> None:
    """Raises ValueError where the library of VERSIONS is another version in the servers' interpreter, or is not there.
    Servers with this interpreter, or on hosts of others, are not asked."""
    if config.python is None or config.placement == "external":
        return
    library, ours, expression = VERSIONS[transport]
    asked = [config.python, "-P", "-c", f"import torch; print({expression})"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=VERSION_TIMEOUT, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise InputError(f"rollout.python: {config.python} does not tell its version of {library} ({error})") from None
    if (theirs := said.strip()) != ours():
        raise InputError(
            f"rollout.sync.transport: {transport} needs one version of {library} on both sides: {ours()} in "
            f"{sys.executable}, {theirs or 'none'} in {config.python}; install one torch in both, or set "
            f"{'rollout.placement: split' if transport == 'ipc' else 'rollout.sync.transport: gloo'}"
        )
