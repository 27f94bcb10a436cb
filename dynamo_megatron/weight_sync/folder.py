"""The policy as a Hugging Face folder on disk, a file a bucket, for exports and for servers that load from disk.

Rank 0 adds the index and what else the model's folder holds, so that the folder loads in transformers as well.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from dynamo_megatron.checkpoint.safetensors_folder import (
    CHAT_TEMPLATE_FILE,
    EXPORT_FILE,
    copy_companions,
    set_dtype,
    write_file,
    write_index,
)
from dynamo_megatron.config.rollout import FP8_CONFIG
from dynamo_megatron.policy.policy import Policy
from dynamo_megatron.rollout.servers.server_api import Endpoint, call, check_version
from dynamo_megatron.weight_sync.schedule import Bucket, BucketSource, SendSchedule, make_schedule
from dynamo_megatron.weight_sync.transports.base import Transport

FILE_BYTES = 1 << 30  # of a file, more where one parameter is larger: host memory stays bounded


def export_huggingface(policy: Policy, folder: Path, step: int) -> None:
    """The policy as a Hugging Face folder that appears, or takes the old one's place, when it is complete.

    `export.json` in it says {"step": step}. Collective over all ranks. Raises OSError where the disk is full.
    """
    aside, old = (folder.with_name(f".{folder.name}.{name}") for name in ("unfinished", "old"))
    try:
        write_huggingface(policy, aside)
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)  # what is left of it would keep a full disk full
        raise
    if policy.layout.rank == 0:
        (aside / EXPORT_FILE).write_text(json.dumps({"step": step}) + "\n", encoding="utf-8")
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        aside.rename(folder)
        shutil.rmtree(old, ignore_errors=True)


def write_huggingface(policy: Policy, folder: Path) -> int:
    """Writes the policy as a Hugging Face folder and returns its bytes of parameters; collective over all ranks. Raises
    OSError."""
    layout, config = policy.layout, policy.config
    itemsize = getattr(torch, config.model.dtype).itemsize
    schedule = make_schedule(
        policy.spec, config.parallel, layout.world_size, bucket_bytes=FILE_BYTES, itemsize=itemsize
    )
    source = BucketSource(policy, schedule)
    if layout.rank == 0:
        empty_folder(folder)
    dist.barrier(group=layout.host)
    for number in range(len(schedule.rounds)):
        if (tensors := source.gather(number)) is not None:
            write_bucket(folder, schedule.bucket_of(layout.rank, number).number, tensors)
    if layout.rank == 0:
        write_companions(policy, folder, schedule)
    dist.barrier(group=layout.host)
    return schedule.nbytes


def empty_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def write_bucket(folder: Path, number: int, tensors: Mapping[str, torch.Tensor]) -> None:
    described = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    write_file(folder / _file(number), described, tensors.__getitem__)


def write_companions(policy: Policy, folder: Path, schedule: SendSchedule) -> None:
    """The index and what is not weights: from the model's folder, but for what config.json says of the weights."""
    file_of = {name: _file(bucket.number) for bucket in schedule.buckets for name in bucket.names}
    write_index(folder, file_of, schedule.nbytes)
    template = None if policy.config.data.chat_template is None else Path(policy.config.output_dir) / CHAT_TEMPLATE_FILE
    copy_companions(Path(policy.config.model.path), folder, template)
    set_dtype(folder, policy.config.model.dtype, FP8_CONFIG if schedule.quantization else None)


def _file(number: int) -> str:
    return f"model-{number:05d}.safetensors"


class DiskTransport(Transport):
    def __init__(self, policy: Policy, schedule: SendSchedule, folder: Path):
        self._policy, self._schedule, self._folder = policy, schedule, folder.absolute()
        self._timeout = policy.config.rollout.start_timeout  # a load takes what the start's did

    def begin(self, endpoint: Endpoint) -> None:
        pass

    def prepare(self) -> None:
        empty_folder(self._folder)
        write_companions(self._policy, self._folder, self._schedule)

    def stage(self, number: int, tensors: Mapping[str, torch.Tensor]) -> int:
        write_bucket(self._folder, number, tensors)
        return sum(tensor.nbytes for tensor in tensors.values())

    def turn(
        self, turn: int, buckets: Sequence[Bucket], own: Bucket | None, endpoints: Sequence[Endpoint]
    ) -> list[Endpoint]:
        return []

    def send(self, endpoint: Endpoint) -> int:
        raise AssertionError("a server loads from disk when all is written")

    def finish(self, endpoint: Endpoint, version: int) -> None:
        payload = {
            "model_path": str(self._folder),
            "load_format": "auto",  # the server's own may be dummy (rollout/servers/server.py)
            "weight_version": str(version),
            "flush_cache": True,
        }
        call(endpoint, "/update_weights_from_disk", payload, self._timeout)
        check_version(endpoint, version)
