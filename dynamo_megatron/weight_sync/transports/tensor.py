"""`tensor`: CPU tensors in shared memory, whose handle goes over HTTP. Only for servers on the sending rank's host.

A bucket is written once, for all servers; each server rank maps it and copies its own shard into its parameters.
"""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.multiprocessing

from dynamo_megatron.rollout.servers.endpoint import Endpoint
from dynamo_megatron.runtime.process_signals import FOR_THE_RANKS, keeping
from dynamo_megatron.weight_sync.transports.base import FlatBuffer, Transport, pickled, send_handles


class TensorTransport(Transport):
    def __init__(self) -> None:
        # With the default, file descriptors, a process that is not our child cannot authenticate, and SGLang's
        # scheduler dies of it.
        torch.multiprocessing.set_sharing_strategy("file_system")
        with keeping(*FOR_THE_RANKS):
            _shared(1)  # starts torch's shared-memory manager: these signals would kill it and break later weight syncs
        self._buffer = FlatBuffer(_shared)

    def stage(self, number: int, tensors: Mapping[str, torch.Tensor]) -> int:
        self._buffer.fill(tensors)
        return self._buffer.used.nbytes

    def send(self, endpoint: Endpoint) -> int:
        # A pickled handle counts as one reader of the shared memory: every server rank needs its own.
        handles = [pickled(self._buffer.used, self._buffer.tensors) for _ in range(endpoint.tp)]
        send_handles(endpoint, handles)
        return sum(map(len, handles))

    def end(self) -> None:
        self._buffer = FlatBuffer(_shared)


def _shared(nbytes: int) -> torch.Tensor:
    """Returns a uint8 tensor [nbytes] in shared memory that is removed with the tensor. torch would leave the memory
    behind if a handle is never read, as when a server fails. Therefore one reader more than there are is registered: no
    reader removes the memory, and this process does.

    Raises OSError where /dev/shm has no room for it.
    """
    try:
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
