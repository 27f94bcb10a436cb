"""`gloo` and `nccl`: a process group of one sender and one server's ranks, in which the sender broadcasts.

Each server has a group of its own: a failure of one server breaks no other server's group. A group belongs to the
server's incarnation and is separate from the groups of the training ranks, so that no failure of a server reaches
those. `nccl` has never run (docs/rollouts.md).
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
import uuid
from collections.abc import Mapping
from typing import Literal
from unittest import mock
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _new_process_group_helper, _world

from dynamo_megatron.rollout.servers.server_api import TRANSFER_TIMEOUT, Endpoint, ServerError, call, request
from dynamo_megatron.runtime.listening import address_towards, gloo_listens_on, serve_store
from dynamo_megatron.runtime.threads import Call
from dynamo_megatron.weight_sync.transports.base import FlatBuffer, Transport

JOIN_TIMEOUT = 120.0  # seconds for all members of a group to meet
GROUP_TIMEOUT = TRANSFER_TIMEOUT + 60  # seconds for one broadcast: the server's own error comes first
LEAVE_TIMEOUT = 5.0
POLL_EVERY = 0.01  # seconds
ERROR_HANDLING, CLEAN_UP_ONLY = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"  # by default a broken group ends the process


class GroupTransport(Transport):
    def __init__(self, backend: Literal["gloo", "nccl"], device: torch.device):
        self._backend, self._device = backend, device
        self._buffer = FlatBuffer(self._allocate)
        self._groups: dict[str, tuple[Endpoint, str, dist.ProcessGroup]] = {}  # by the server's name
        self._connecting = threading.Lock()  # sets environment variables

    def _connect(self, endpoint: Endpoint) -> None:
        self.forget(endpoint)  # the group of an earlier incarnation
        name = f"{endpoint.name}-{endpoint.incarnation}-{uuid.uuid4().hex[:12]}"  # a server may outlive the run
        size, address = 1 + endpoint.tp, address_towards(urlsplit(endpoint.url).hostname)
        store = serve_store(address, 0, JOIN_TIMEOUT)
        payload = {
            "master_address": address,
            "master_port": store.port,
            "rank_offset": 1,
            "world_size": size,
            "group_name": name,
            "backend": self._backend,
        }
        theirs = Call(call, endpoint, "/init_weights_update_group", payload, JOIN_TIMEOUT)
        ours = Call(self._join, store, address, name, size)
        while not ours.wait(POLL_EVERY):
            if theirs.failed():
                theirs.result()  # this rank's attempt ends by itself, after JOIN_TIMEOUT
        self._groups[endpoint.name] = endpoint, name, ours.result()
        theirs.result()

    def stage(self, number: int, tensors: Mapping[str, torch.Tensor]) -> int:
        self._buffer.fill(tensors)
        return 0

    def send(self, endpoint: Endpoint) -> int:
        with self._connecting:
            if self._groups.get(endpoint.name, (None,))[0] != endpoint:
                self._connect(endpoint)
        _, name, group = self._groups[endpoint.name]
        how = {"group_name": name, "load_format": "flattened_bucket", "flush_cache": False}
        payload = self._buffer.description() | how
        self._synchronize()  # the buffer is filled
        theirs = Call(call, endpoint, "/update_weights_from_distributed", payload, TRANSFER_TIMEOUT)
        # In a thread: NCCL connects in the first broadcast, and is stuck where the server does not take part.
        ours = Call(self._broadcast, group, self._buffer.used)
        deadline = time.monotonic() + GROUP_TIMEOUT
        while not ours.wait(POLL_EVERY):
            if theirs.failed():
                break  # the server will not take part: waiting would take as long as the group's timeout
            if time.monotonic() > deadline:
                raise ServerError(f"the broadcast to it was not done within {GROUP_TIMEOUT:g} s")
        if ours.failed():
            theirs.wait(LEAVE_TIMEOUT)  # the server's error says more than a broken group's
            if not theirs.failed():
                ours.result()
        theirs.result()
        return self._buffer.used.nbytes * endpoint.tp

    def _broadcast(self, group: dist.ProcessGroup, buffer: torch.Tensor) -> None:
        self._synchronize()  # sets this thread's device, for the broadcast
        options = dist.BroadcastOptions()
        options.rootRank, options.asyncOp = 0, True
        group.broadcast([buffer], options).wait()
        self._synchronize()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a thread has a current device of its own
            torch.cuda.current_stream().synchronize()

    def forget(self, endpoint: Endpoint) -> None:
        if known := self._groups.pop(endpoint.name, None):
            _leave(known[2])

    def end(self) -> None:
        self._buffer = FlatBuffer(self._allocate)

    def close(self) -> None:
        for endpoint, name, group in self._groups.values():
            with contextlib.suppress(ServerError):  # it is gone, and its end of the group with it
                request(endpoint, "/destroy_weights_update_group", {"group_name": name}, LEAVE_TIMEOUT)
            _leave(group)
        self._groups.clear()

    def _allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def _join(self, store: dist.TCPStore, address: str, name: str, size: int) -> dist.ProcessGroup:
        """Joins as sglang.srt.utils.init_custom_process_group does on the server: prefixes and backends must be the
        same."""
        # With gloo the members meet here, with NCCL in the first broadcast.
        timeout = GROUP_TIMEOUT if self._backend == "nccl" else JOIN_TIMEOUT
        with mock.patch.dict(os.environ, {ERROR_HANDLING: CLEAN_UP_ONLY}), gloo_listens_on(address):
            group, _ = _new_process_group_helper(
                size,
                0,
                [],
                dist.Backend(self._backend),
                dist.PrefixStore(name, store),
                group_name=name,
                timeout=datetime.timedelta(seconds=timeout),
            )
        _world.pg_group_ranks[group] = {rank: rank for rank in range(size)}  # destroy_process_group looks it up
        return group


def _leave(group: dist.ProcessGroup) -> None:
    group.abort()  # else it would wait for what is under way
    dist.destroy_process_group(group)
