"""Checks of this node: GPUs, ports and network, disk, host memory, and a server of two layers of random weights."""

from __future__ import annotations

import asyncio
import glob
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from dynamo_megatron.data.templates import end_token_ids
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
from dynamo_megatron.preflight.findings import Finding, ok, skipped
from dynamo_megatron.preflight.job_checks import Subject
from dynamo_megatron.rollout.client import ServerLost, SGLangClient, open_session
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.rollout.servers.server import SGLangServer
from dynamo_megatron.runtime.listening import ranks_address
from dynamo_megatron.runtime.run_folder import refuse_foreign
from dynamo_megatron.weight_sync.transports import check_transport

SHARED_MEMORY = 1 << 30  # bytes of /dev/shm that NCCL and SGLang's ranks may want
LAYERS, TOKENS = 2, 8  # of the server that is tried, and generated
# Random weights and no CUDA graphs: this tests the interpreter, the kernels, the server's ranks and the protocol.
SLICE = ("--load-format", "dummy", "--max-total-tokens", "4096", "--context-length", "1024", "--disable-cuda-graph")


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


def server(subject: Subject) -> Iterator[Finding]:
    """Checks that SGLang starts in its interpreter and answers a request with tokens and logprobs."""
    rollout = subject.config.rollout
    if rollout.engine != "sglang" or rollout.placement == "external":
        yield skipped("this run starts no servers")
        return
    folder = Path(tempfile.mkdtemp(prefix="preflight-"))
    try:
        yield ok(asyncio.run(_try(subject, folder / "sglang.log")))
    except (RolloutError, ServerLost, TimeoutError) as error:
        # The folder is kept: the message names the log in it.
        raise InputError(
            f"{error}; if the cause is not the model's, name another rollout.python or correct rollout.server_args"
        ) from None
    shutil.rmtree(folder, ignore_errors=True)


async def _try(subject: Subject, log: Path) -> str:
    config = subject.config
    layers = json.dumps({"num_hidden_layers": min(LAYERS, subject.spec.num_layers)})
    arguments = [*config.rollout.server_args, *SLICE, "--json-model-override-args", layers]
    changes = {"server_args": arguments, "host": "127.0.0.1", "port": None, "max_new_tokens": TOKENS, "stop": []}
    rollout = config.rollout.model_copy(update=changes)
    process = SGLangServer(rollout, config.model, log)
    process.start()
    try:
        await process.wait_ready()
        async with open_session() as session:
            ends = end_token_ids(config.model.path, subject.tokenizer)
            client = SGLangClient(session, process.endpoint, rollout, ends)
            response = await client.generate("preflight", subject.tokenizer.encode("1 + 1 ="))
    finally:
        process.stop()
    if response.error or not response.tokens or len(response.logprobs) != len(response.tokens):
        raise RolloutError(f"the server starts but does not generate: {response.error or 'no tokens'}; see {log}")
    return f"SGLang started with {layers} and generated {len(response.tokens)} tokens with logprobs"
