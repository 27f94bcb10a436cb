"""`tensor` and `ipc`: handles of memory that go over HTTP, for servers on the sending rank's host.

`tensor`: CPU tensors in shared memory. A bucket is written once, for all servers; each server rank maps it and copies
its own shard into its parameters.

`ipc`: colocated servers read each bucket from the memory of their own GPU. A bucket is broadcast to all training ranks;
each makes a CUDA IPC handle of its copy, and the rank on the first GPU of a server posts the handles of all the
server's GPUs, in the order of the server's ranks. It has run on one GPU (docs/gpu.md).
"""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.multiprocessing import reductions

from dynamo_megatron.policy.layout import Layout
from dynamo_megatron.rollout.servers.server_api import CONTROL_TIMEOUT, Endpoint, ServerError, call_for
from dynamo_megatron.runtime.process_signals import FOR_THE_RANKS, keeping
from dynamo_megatron.weight_sync.schedule import Bucket
from dynamo_megatron.weight_sync.transports import is_local
from dynamo_megatron.weight_sync.transports.base import FlatBuffer, Transport, pickled, send_handles


class TensorTransport(Transport):
    stages_ahead = True

    def __init__(self) -> None:
        # With the default, file descriptors, a process that is not our child cannot authenticate, and SGLang's
        # scheduler dies of it.
        torch.multiprocessing.set_sharing_strategy("file_system")
        self.end()

    def stage(self, number: int, tensors: Mapping[str, torch.Tensor]) -> int:
        self._next.fill(tensors)
        return self._next.used.nbytes

    def turn(
        self, turn: int, buckets: Sequence[Bucket], own: Bucket | None, endpoints: Sequence[Endpoint]
    ) -> list[Endpoint]:
        # A server replies when its first rank has loaded a bucket; the others may still copy from that one.
        if turn == 0:
            self._buffer, self._next, self._before = self._next, self._before, self._buffer
        return super().turn(turn, buckets, own, endpoints)

    def send(self, endpoint: Endpoint) -> int:
        # A pickled handle counts as one reader of the shared memory: every server rank needs its own.
        handles = [pickled(self._buffer.used, self._buffer.tensors) for _ in range(endpoint.tp)]
        send_handles(endpoint, handles)
        return sum(map(len, handles))

    def end(self) -> None:
        self._buffer, self._next, self._before = (FlatBuffer(_shared) for _ in range(3))


def _shared(nbytes: int) -> torch.Tensor:
    """Returns a uint8 tensor [nbytes] in shared memory that is removed with the tensor. torch would leave the memory
    behind if a handle is never read, as when a server fails. Therefore one reader more than there are is registered: no
    reader removes the memory, and this process does. Raises OSError where /dev/shm has no room for it."""
    try:
        with keeping(*FOR_THE_RANKS):  # the first starts torch's shared-memory manager, which these would kill
            tensor = torch.empty(nbytes, dtype=torch.uint8).share_memory_()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        if os.strerror(errno.ENOSPC) not in reason:
            raise
        raise OSError(
            f"/dev/shm has no room for {nbytes / 1e6:.2f} MB of weights ({reason}); free some there, or lower "
            "rollout.sync.bucket_bytes, and resume"
        ) from None
    storage = tensor.untyped_storage()
    storage._shared_incref()
    name = storage._share_filename_cpu_()[1].decode()
    weakref.finalize(tensor, Path(f"/dev/shm{name}").unlink, missing_ok=True)
    return tensor


DEVICE = 6  # position of the device in rebuild_cuda_tensor's arguments


class IpcTransport(Transport):
    stages_ahead = True

    def __init__(self, layout: Layout):
        self._layout = layout
        self._staged = FlatBuffer(self._allocate)
        # What servers read, and what they read in the turn before: ranks of a server besides the first may still copy
        # from that after the server's reply.
        self._copies: list[torch.Tensor | None] = [None, None]
        self._ranks: dict[Endpoint, list[int]] = {}  # the training rank on the GPU of each of a server's ranks
        self._handles: list[str] = []  # by training rank, of the bucket of this turn
        self._failed: set[Endpoint] = set()  # in this weight sync

    def stage(self, number: int, tensors: Mapping[str, torch.Tensor]) -> int:
        self._staged.fill(tensors)
        return 0

    def turn(
        self, turn: int, buckets: Sequence[Bucket], own: Bucket | None, endpoints: Sequence[Endpoint]
    ) -> list[Endpoint]:
        """Collective over all ranks: in turn t every server receives bucket t."""
        self._locate(endpoints)
        bucket = buckets[turn]
        _, copy = self._copies
        if copy is None or copy.numel() < bucket.nbytes:
            copy = self._allocate(bucket.nbytes)
        self._copies = [copy, self._copies[0]]
        here, self._size = copy[: bucket.nbytes], bucket.nbytes
        if own is bucket:
            here.copy_(self._staged.used)
        dist.broadcast(here, src=bucket.sender)
        torch.cuda.current_stream().synchronize()
        metadata = self._layout.gather(self._staged.tensors if own is bucket else None)[bucket.sender]
        # Only what is read: an unread handle keeps its memory from being freed.
        reads = any(self._layout.rank in self._ranks[e] for e in endpoints if e not in self._failed)
        self._handles = self._layout.gather(pickled(here, metadata, _Pickler) if reads else "")
        return [e for e in endpoints if (self._ranks[e] or [0])[0] == self._layout.rank]

    def send(self, endpoint: Endpoint) -> int:
        if not (ranks := self._ranks[endpoint]):
            raise ServerError("its GPUs are not those of training ranks: CUDA IPC needs rollout.placement colocated")
        send_handles(endpoint, [self._handles[rank] for rank in ranks])
        return self._size * endpoint.tp

    def forget(self, endpoint: Endpoint) -> None:
        self._failed.add(endpoint)

    def end(self) -> None:
        self._staged, self._copies = FlatBuffer(self._allocate), [None, None]
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()  # servers use the same GPUs
        self._failed.clear()

    def _locate(self, endpoints: Sequence[Endpoint]) -> None:
        """Finds which training rank is on which server rank's GPU, once for every incarnation. Collective over all
        ranks where there are new servers."""
        if not (new := [endpoint for endpoint in endpoints if endpoint not in self._ranks]):
            return
        own = _uuid(self._layout.local_rank)
        mine = {}
        for endpoint in (e for e in new if is_local(e.url)):
            try:
                first, step = call_for(endpoint, "/server_info", None, CONTROL_TIMEOUT, "base_gpu_id", "gpu_id_step")
            except ServerError:
                continue  # then no rank is found for it, and `send` says so
            gpus = [first + rank * step for rank in range(endpoint.tp)]
            if max(gpus) >= torch.cuda.device_count():
                continue
            uuids = [_uuid(gpu) for gpu in gpus]
            if own in uuids:
                mine[endpoint.name] = uuids.index(own)
        places = self._layout.gather(mine)
        for endpoint in new:
            found = {place[endpoint.name]: rank for rank, place in enumerate(places) if endpoint.name in place}
            self._ranks[endpoint] = [found[i] for i in range(endpoint.tp)] if len(found) == endpoint.tp else []

    def _allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._layout.device)


class _Pickler(ForkingPickler):
    """As torch's, but a CUDA tensor's device is its GPU's UUID, which SGLang (utils/patch_torch.py) looks up: the same
    GPU may have another number in the server's process."""

    def reducer_override(self, value):
        if isinstance(value, torch.Tensor) and value.is_cuda:
            rebuild, arguments = reductions.reduce_tensor(value)
            return rebuild, (*arguments[:DEVICE], _uuid(value.device.index), *arguments[DEVICE + 1 :])
        return NotImplemented


def _uuid(gpu: int) -> str:
    return str(torch.cuda.get_device_properties(gpu).uuid)
