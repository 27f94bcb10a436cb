"""`disk`: a Hugging Face folder on a file system that the servers see under the same path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from dynamo_megatron.policy.policy import Policy
from dynamo_megatron.rollout.servers.endpoint import Endpoint
from dynamo_megatron.rollout.servers.server_api import call, check_version
from dynamo_megatron.weight_sync.folder import empty_folder, write_bucket, write_companions
from dynamo_megatron.weight_sync.schedule import Bucket, SendSchedule
from dynamo_megatron.weight_sync.transports.base import Transport


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
            "load_format": "auto",  # the server's own may be dummy (rollout/server.py)
            "weight_version": str(version),
            "flush_cache": True,
        }
        call(endpoint, "/update_weights_from_disk", payload, self._timeout)
        check_version(endpoint, version)
