"""Checks of this node: GPUs, ports and network, disk, host memory."""

from __future__ import annotations

import glob
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from dynamo_megatron.errors import InputError
from dynamo_megatron.jobs.start_checks import (
    check_layout,
    check_ports,
    check_room,
    check_servers_here,
    existing_folder,
)
from dynamo_megatron.jobs.start_checks import size_text as _size
from dynamo_megatron.planning.plan import host_memory as planned_host_memory
from dynamo_megatron.planning.plan import workload
from dynamo_megatron.preflight.findings import Finding, ok
from dynamo_megatron.preflight.job_checks import Subject
from dynamo_megatron.runtime.listening import ranks_address
from dynamo_megatron.runtime.run_folder import refuse_foreign
from dynamo_megatron.weight_sync.transports import check_transport

SHARED_MEMORY = 1 << 30  # bytes of /dev/shm that NCCL and SGLang's ranks may want


def devices(subject: Subject) -> Iterator[Finding]:
    """Whether torch sees a GPU for each rank, where this process seems to be meant to have some."""
    count, visible = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    given = visible not in ("", "-1", "NoDevFiles") if visible is not None else glob.glob("/dev/nvidia[0-9]*")
    if count < subject.ranks_here and (count or given or os.environ.get("SLURM_GPUS_ON_NODE", "0") != "0"):
        raise InputError(
            f"devices: {subject.ranks_here} ranks on this node, and torch {torch.__version__} sees {count} GPUs "
            f"(CUDA_VISIBLE_DEVICES={'not set' if visible is None else visible}); ask for a GPU a rank, install "
            "torch's CUDA build, see that the container gets the GPUs, or set CUDA_VISIBLE_DEVICES= for a run on CPUs"
        )
    yield ok(f"{count} x {torch.cuda.get_device_name()}" if count else "no GPU: the ranks run on CPUs")


def network(subject: Subject) -> Iterator[Finding]:
    """The ports and addresses that the configuration or the launcher has fixed, and what brings the servers weights."""
    config, rewards = subject.config, subject.config.reward.servers
    check_ports(config)
    check_servers_here(config.rollout)
    transport = check_transport(config.rollout)
    if "RANK" in os.environ:
        ranks_address()  # raises where other hosts could not reach this one
    where = f"rollout.port {config.rollout.port}" if config.rollout.port else "free ones are taken"
    if rewards is not None and rewards.port is not None:
        where += f", reward.servers.port {rewards.port}"
    rendezvous = os.environ.get("MASTER_PORT", "a free one is taken")
    yield ok(f"ports of servers: {where}; rendezvous: {rendezvous}; weights go by {transport}")


def disk(subject: Subject) -> Iterator[Finding]:
    """Room for the run's files in a folder that can be written."""
    output = Path(subject.config.output_dir)
    refuse_foreign(output)
    told = check_room(subject.config, subject.spec)
    folder = existing_folder(output)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".preflight-"):
            yield ok(told)
    except OSError as error:
        raise InputError(f"output_dir: {folder} cannot be written ({error.strerror}); name another folder") from None


def host_memory(subject: Subject) -> Iterator[Finding]:
    """What the ranks here keep in host memory against what is available, the job's own limit included."""
    config, spec = subject.config, subject.spec
    check_layout(config, subject.ranks)
    tokens, cuda = workload(config, spec).mean, torch.cuda.is_available()
    parts = planned_host_memory(config, spec, subject.ranks, subject.ranks_here, tokens, cuda=cuda)
    needed, available = sum(parts.values()), min(psutil.virtual_memory().available, _cgroup_room())
    told = ", ".join(f"{what} {_size(value)}" for what, value in parts.items())
    if needed > available:
        raise InputError(
            f"host memory: {_size(available)} available on this node, the run needs about {_size(needed)} at its peak "
            f"({told}); ask for more memory (sbatch --mem), fewer ranks a node, or set checkpoint.async: false or "
            "rollout.offload: false"
        )
    shared = os.statvfs("/dev/shm")
    if (room := shared.f_bavail * shared.f_frsize) < SHARED_MEMORY:
        raise InputError(
            f"/dev/shm has {_size(room)} free, NCCL and the servers may want {_size(SHARED_MEMORY)}; start the "
            "container with --shm-size or --ipc=host, or empty it"
        )
    yield ok(f"{_size(available)} available for {told}")


def _cgroup_room(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float:
    """Bytes to this process's memory limit (SLURM's or a container's), of cgroups of version 2; infinite without one.
    Cached pages of files, which the kernel frees first, count as free."""
    groups = [line[3:] for line in own.read_text(encoding="ascii").splitlines() if line.startswith("0::")]
    folder, room = root / "".join(groups).strip("/"), float("inf")
    for level in (folder, *folder.parents):
        limit = level / "memory.max"
        if limit.is_file() and (text := limit.read_text().strip()) != "max":
            counts = dict(line.split() for line in (level / "memory.stat").read_text().splitlines())
            used = int((level / "memory.current").read_text()) - int(counts["inactive_file"])
            room = min(room, int(text) - used)
    return room
