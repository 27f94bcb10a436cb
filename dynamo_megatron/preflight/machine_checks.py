"""This node: ports, disk, host memory, versions of the trainer's and the server's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import psutil
import torch

from dynamo_megatron.errors import InputError
from dynamo_megatron.jobs.layout_checks import check_layout
from dynamo_megatron.jobs.start_checks import check_ports, check_room, existing_folder
from dynamo_megatron.jobs.start_checks import size_text as _size
from dynamo_megatron.planning import formulas
from dynamo_megatron.planning.host import host_memory as planned_host_memory
from dynamo_megatron.planning.plan import workload
from dynamo_megatron.policy.backend import Fusions
from dynamo_megatron.preflight.findings import Finding, failed, note, ok, skipped
from dynamo_megatron.preflight.subject import Subject
from dynamo_megatron.preflight.tested import SERVER, TRAINER, faults
from dynamo_megatron.rollout.retention import SHARE, stored_step
from dynamo_megatron.runtime.run_folder import refuse_foreign
from dynamo_megatron.weight_sync.transports import check_transport

SPEED_BYTES, SPEED_CHUNK, SPEED_SECONDS = 256 << 20, 16 << 20, 4.0  # what a measurement of the disk writes at most
SLOW_CHECKPOINT = 600.0  # seconds
ASK_TIMEOUT = 60.0  # seconds for an interpreter to start and tell its versions, from a busy network file system
SHARED_MEMORY = 1 << 30  # bytes of /dev/shm that NCCL and SGLang's ranks may want


def ports(subject: Subject) -> Iterator[Finding]:
    """Those that the configuration or the launcher has fixed."""
    check_ports(subject.config)
    rollout, rewards = subject.config.rollout, subject.config.reward.servers
    where = f"rollout.port {rollout.port}" if rollout.port else "free ones are taken"
    if rewards is not None and rewards.port is not None:
        where += f", reward.servers.port {rewards.port}"
    yield ok(f"servers: {where}; rendezvous: {os.environ.get('MASTER_PORT', 'a free one is taken')}")


def disk(subject: Subject) -> Iterator[Finding]:
    """Room for the run's files, and the disk's speed with what a checkpoint then takes."""
    refuse_foreign(Path(subject.config.output_dir))
    told = check_room(subject.config, subject.spec)
    folder = existing_folder(Path(subject.config.output_dir))
    try:
        speed = _write_speed(folder)
    except OSError as error:
        raise InputError(f"output_dir: {folder} cannot be written ({error.strerror}); name another folder") from None
    config = subject.config
    seconds = formulas.checkpoint_bytes(subject.spec, config.model.dtype) / speed
    yield ok(f"{told}; this node writes {_size(speed)}/s, a checkpoint would take it {seconds:.1f} s")
    if seconds > SLOW_CHECKPOINT:
        yield note("checkpoints are slow here: name a faster disk in output_dir, or set checkpoint.async: true")
    if config.rollout.keep_last is not None:
        return
    stat = os.statvfs(folder)
    room = SHARE * stat.f_bavail * stat.f_frsize
    step = stored_step(config.rollout_budget, config.rollout.max_new_tokens / 2)
    steps = config.trainer.steps
    told = (
        f"rollouts: {_size(step)} a step of responses half as long as rollout.max_new_tokens, {_size(steps * step)} in "
        f"{steps} steps"
    )
    if config.checkpoint.every is None:
        yield ok(f"{told}; all are kept: without checkpoints (checkpoint.every: null) a resume needs them all")
    elif steps * step <= room:
        yield ok(f"{told}; all are kept, they may take {SHARE:.0%} of what is free")
    else:
        yield note(
            f"{told}; {SHARE:.0%} of what is free holds {room // step:.0f} steps, then the oldest go: name a larger "
            "disk, or set rollout.keep_last"
        )


def _write_speed(folder: Path) -> float:
    """bytes / s of one writer, on disk and not in a cache; the file is removed."""
    chunk = os.urandom(SPEED_CHUNK)
    start, written = time.monotonic(), 0
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".preflight-") as file:
        while written < SPEED_BYTES and time.monotonic() - start < SPEED_SECONDS:
            file.write(chunk)
            written += len(chunk)
            os.fsync(file.fileno())
    return written / (time.monotonic() - start)


def host_memory(subject: Subject) -> Iterator[Finding]:
    """What the ranks here keep in host memory against what is available, the job's own limit included."""
    config, spec = subject.config, subject.spec
    check_layout(config, subject.ranks)
    tokens, cuda = workload(config, spec, None).mean, torch.cuda.is_available()
    host = planned_host_memory(config, spec, subject.ranks, subject.ranks_here, tokens, cuda=cuda)
    available = min(psutil.virtual_memory().available, _cgroup_room())
    told = ", ".join(f"{what} {_size(value)}" for what, value in host.parts.items())
    if host.peak > available:
        raise InputError(
            f"host memory: {_size(available)} available on this node, the run needs about "
            f"{_size(host.peak)} at its peak ({told}); ask for more memory (sbatch --mem), fewer ranks a node, or set "
            "checkpoint.async: false or rollout.offload: false"
        )
    yield ok(f"{_size(available)} available for {told}")
    shared = os.statvfs("/dev/shm")
    if (room := shared.f_bavail * shared.f_frsize) < SHARED_MEMORY:
        yield failed(
            f"/dev/shm has {_size(room)} free, NCCL and the servers may want {_size(SHARED_MEMORY)}; start the "
            "container with --shm-size or --ipc=host, or empty it"
        )


def _cgroup_room(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float:
    """Bytes to this process's memory limit (SLURM's or a container's), under cgroups of either version; infinite
    without one. Cached pages of files, which the kernel frees first, count as free."""
    files = ("memory.max", "memory.current", "inactive_file")
    folder, groups = root, [line.split(":", 2) for line in own.read_text(encoding="ascii").splitlines()]
    for _, controllers, group in groups:
        if controllers == "":
            folder = root / group.strip("/")
    for _, controllers, group in groups:
        if "memory" in controllers.split(","):  # version 1, or both at once
            folder = root / "memory" / group.strip("/")
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    room = float("inf")
    for level in (folder, *folder.parents):
        limit, used, statistics = level / files[0], level / files[1], level / "memory.stat"
        if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
            counts = dict(line.split() for line in statistics.read_text().splitlines())
            room = min(room, int(text) - int(used.read_text()) + int(counts[files[2]]))
    return room


def trainer_version(name: str) -> str | None:
    """Of a package in this interpreter; None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def trainer_faults() -> list[Finding]:
    """What is missing, too old or untested in this interpreter."""
    mend = f"{sys.executable} -m pip install -c requirements/lock.txt"
    return list(faults(TRAINER, trainer_version, "the trainer's interpreter", mend, cuda=torch.cuda.is_available()))


def versions(subject: Subject) -> Iterator[Finding]:
    """The trainer's packages and the server's, each in its own interpreter."""
    found = trainer_faults()
    config = subject.config.rollout
    serves = config.engine == "sglang" and config.placement != "external"
    if serves:
        python = config.python or sys.executable
        there = server_versions(python)
        mend = f"{python} -m pip install"
        found += faults(SERVER, there.get, f"the server's interpreter {python}", mend, cuda=torch.cuda.is_available())
    shown = [f"{p.name} {v}" for p in TRAINER[:3] if (v := trainer_version(p.name))]
    if serves:
        shown += [f"server: {name} {v}" for name, v in there.items() if v and name in ("sglang", "torch")]
    yield ok(", ".join(shown))
    yield from found
    if not serves:
        yield skipped("no server is started: its versions are not asked for")
    elif config.placement == "colocated" and not torch.cuda.is_available():
        yield from torch_of_both(there)
    check_transport(config)


def optional_packages() -> Iterator[Finding]:
    """Which of them serve the ranks here; each is imported, since one that is only half there would end the run."""
    fusions = Fusions.detect()
    yield ok(str(fusions))
    if fusions.norm != fusions.attention:
        yield note(
            "attention is torch's, a call for each distinct length: transformer-engine has none for packed sequences "
            f"on this GPU ({torch.cuda.get_device_name()}) without flash-attn; pip install flash-attn"
        )


def torch_of_both(server: dict[str, str | None]) -> Iterator[Finding]:
    """A note where colocated servers could not take weights on GPUs, which only a node with GPUs refuses."""
    ours, theirs = trainer_version("torch"), server["torch"]
    if theirs and ours != theirs:
        yield note(
            f"torch is {ours} in the trainer's interpreter and {theirs} in the server's; colocated servers on GPUs "
            "need one version (docs/install.md), or rollout.placement: split"
        )


def server_versions(python: str) -> dict[str, str | None]:
    """package -> version, or None, as the interpreter `python` tells. Raises ValueError where it cannot be run."""
    names = [p.name for p in SERVER] + ["sgl-kernel"]
    program = (
        "import json, sys\nfrom importlib import metadata\nfound = {}\nfor name in sys.argv[1:]:\n"
        "    try: found[name] = metadata.version(name)\n"
        "    except metadata.PackageNotFoundError: found[name] = None\n"
        "print(json.dumps(found))"
    )
    try:
        done = subprocess.run(
            [python, "-P", "-c", program, *names], capture_output=True, text=True, timeout=ASK_TIMEOUT, check=True
        )
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        why = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        why = f"no answer in {ASK_TIMEOUT:g} s"
    except (OSError, ValueError, IndexError) as error:
        why = str(error)
    raise InputError(
        f"rollout.python: {python} does not tell its packages ({why}); name the python (3.11 or later) of an "
        "environment with SGLang"
    )
