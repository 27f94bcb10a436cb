"""Checks of this node: GPUs, ports and network, disk, host memory."""

from __future__ import annotations

import contextlib
import glob
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from dynamo_megatron.config import Config
from dynamo_megatron.errors import InputError
from dynamo_megatron.jobs.layout_checks import check_layout, check_servers_here
from dynamo_megatron.models import ModelSpec
from dynamo_megatron.planning import formulas
from dynamo_megatron.planning.plan import host_memory as planned_host_memory
from dynamo_megatron.planning.plan import workload
from dynamo_megatron.preflight.findings import Finding, ok
from dynamo_megatron.preflight.job_checks import Subject
from dynamo_megatron.rollout.retention import stored_step
from dynamo_megatron.rollout.servers.fleet import training_nodes
from dynamo_megatron.rollout.servers.server import listening_address
from dynamo_megatron.runtime.listening import check_port, ranks_address
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


def check_ports(config: Config) -> None:
    """Raises ValueError where `rollout.host` is no address or interface of this node, or where `rollout.port`,
    `reward.servers.port`, or a MASTER_PORT that is set, cannot be listened to here."""
    rollout, rewards = config.rollout, config.reward.servers
    here: list[tuple[str, int | None, int]] = []  # key, first port, ports
    if rollout.engine == "sglang" and rollout.placement == "colocated":
        here.append(("rollout.port", rollout.port, max(1, rollout.servers // training_nodes())))
    if rewards is not None and rollout.placement != "split":  # rank 0's node starts all of them
        here.append(("reward.servers.port", rewards.port, rewards.count))
    host = listening_address(rollout.host) if here else ""
    wanted = [
        (host, port, f"{key}: {{}}; free it, name another one, or leave it out")
        for key, first, count in here
        if first is not None
        for port in range(first, first + count)
    ]
    if "MASTER_PORT" in os.environ and "RANK" not in os.environ:  # a launcher's rank 0 may serve it already
        wanted.append(("", int(os.environ["MASTER_PORT"]), "MASTER_PORT: {}; free it or set another one"))
    for host, port, message in wanted:
        check_port(host, port, message)


def room_needed(config: Config, spec: ModelSpec, *, generates: bool = True) -> dict[str, int]:
    """What -> bytes that a run leaves on disk: `keep_last` checkpoints and the one being written, the exports, the
    weights being pushed, those of a step that ends in NaN or infinity, and of the rollouts, whose lengths nobody knows,
    the steps that stay at their longest: one, or `rollout.keep_last` and the one that is being made; all without
    checkpoints, since a resume begins with them. `generates`: not for sft."""
    weights = formulas.weight_bytes(spec, config.model.dtype)
    exports = {"final": 1, "best": 1, "never": 0, "every": 0}[config.checkpoint.export_hf]
    if config.checkpoint.export_hf == "every":
        exports = -(-config.trainer.steps // (config.checkpoint.every or config.trainer.steps))
    checkpoints = config.checkpoint.keep_last + 1
    if not generates or config.rollout.engine == "recorded":
        steps = 0
    elif config.checkpoint.every is None:
        steps = config.trainer.steps
    else:
        steps = 1 + (config.rollout.keep_last or 0)
    step = stored_step(config.rollout_budget, config.rollout.max_new_tokens)
    return {
        f"{checkpoints} checkpoints": checkpoints * formulas.checkpoint_bytes(spec, config.model.dtype),
        f"{exports} exported folder{'s' * (exports != 1)}": exports * weights,
        "the weights pushed": weights,
        "the weights of a failed step": weights,
        f"the rollouts of {steps} step{'s' * (steps != 1)}": int(steps * step),
    }


def check_room(config: Config, spec: ModelSpec, *, generates: bool = True) -> str:
    """What the run needs and what there is. Raises ValueError where the disk is too small.

    Checkpoints, exports and pushed weights that an earlier start has left count as room: they will be replaced. So do
    its rollouts where the steps that stay are a part of what is needed."""
    output = Path(config.output_dir)
    needed = room_needed(config, spec, generates=generates)
    replaced, ways = ["checkpoints", "hf*", "push"], "lower checkpoint.keep_last"
    if config.rollout.keep_last is not None:
        replaced, ways = [*replaced, "rollouts"], f"{ways} or rollout.keep_last"
    elif config.checkpoint.every is None:
        replaced, ways = [*replaced, "rollouts"], f"{ways}, or set checkpoint.every: old rollouts go after a checkpoint"
    there = sum(_folder_size(folder) for name in replaced for folder in output.glob(name))
    stat = os.statvfs(_existing(output))
    free = stat.f_bavail * stat.f_frsize
    told = ", ".join(f"{what} {_size(size)}" for what, size in needed.items() if size)
    if sum(needed.values()) > free + there:
        raise InputError(
            f"output_dir: {output} has {_size(free)} free, the run needs {_size(sum(needed.values()))} ({told}); "
            f"free some, name a folder on another disk, or {ways}"
        )
    return f"{_size(free)} free for {told}"


def _folder_size(folder: Path) -> int:
    """Bytes of its files; one that another process removes meanwhile has none."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def disk(subject: Subject) -> Iterator[Finding]:
    """Room for the run's files in a folder that can be written."""
    output = Path(subject.config.output_dir)
    refuse_foreign(output)
    told = check_room(subject.config, subject.spec)
    folder = _existing(output)
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


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _size(size: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size / 1e3:.3g} kB"
