"""Large arrays in memory that several processes of one host map: messages that leave such arrays where they are, and
values of rank 0 for every rank.

A step of 8,192 responses of 8k tokens has 0.8 GB of arrays, and with the routes of a mixture of experts many times
that. The memory has no name in any file system: it is gone with the processes that map it, however they end. Between
nodes arrays go as tensors. All ranks of a node map the same pages, copy-on-write: a rank that writes to an array gets
pages of its own.
"""

from __future__ import annotations

import mmap
import os
import pickle
import secrets
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, TypeVar

import numpy as np

from dynamo_megatron.runtime.late import dist, torch

T = TypeVar("T")
APART = 1 << 20  # bytes: arrays of at least this size are not part of a pickled message


def _dump(value: Any) -> tuple[bytes, list[int], int]:
    """Returns `value` pickled without its contiguous arrays of at least `APART` bytes, the sizes of these, and the
    descriptor of new memory that holds them (-1: there are none). Raises OSError where the system refuses it."""
    apart: list[memoryview] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        """Returns whether the buffer stays in the message."""
        if (raw := buffer.raw()).nbytes < APART:
            return True
        apart.append(raw)
        return False

    head, sizes = pickle.dumps(value, protocol=5, buffer_callback=keep), [raw.nbytes for raw in apart]
    descriptor = _create(sizes) if apart else -1
    for raw, start in zip(apart, _starts(sizes), strict=False):
        np.copyto(np.frombuffer(mmap.mmap(descriptor, len(raw), offset=start), np.uint8), np.frombuffer(raw, np.uint8))
    return head, sizes, descriptor


def _load(head: bytes, sizes: Sequence[int], descriptor: int) -> Any:
    """Restores what `_dump` was given; closes the descriptor. The arrays are mapped copy-on-write."""
    places = zip(sizes, _starts(sizes), strict=False)
    buffers = [mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY, offset=start) for size, start in places]
    if sizes:
        os.close(descriptor)
    return pickle.loads(head, buffers=buffers)


def _create(sizes: Sequence[int]) -> int:
    # The random name is how another process knows that it has opened this memory and no other.
    descriptor = os.memfd_create(f"dynamo-megatron-{secrets.token_hex(8)}")
    os.posix_fallocate(descriptor, 0, _starts(sizes)[-1])
    return descriptor


def _starts(sizes: Sequence[int]) -> list[int]:
    """Where in the memory each array of these sizes begins, on a page of its own, and last where the memory ends."""
    return np.cumsum([0, *(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes)]).tolist()


def send(connection: Connection, message: Any) -> None:
    """Sends as `connection.send` does, over a duplex pipe to a process of this host. Raises OSError."""
    head, sizes, descriptor = _dump(message)
    connection.send((head, sizes))
    if sizes:
        send_handle(connection, descriptor, None)
        os.close(descriptor)


def receive(connection: Connection) -> Any:
    """Returns what `send` sent. Raises EOFError and OSError as `connection.recv` does."""
    head, sizes = connection.recv()
    return _load(head, sizes, recv_handle(connection) if sizes else -1)


def share(value: T | None, layout: Any) -> T:
    """Returns on every rank the `value` of rank 0 (None elsewhere), which must be picklable; collective over all ranks.
    `layout`: policy/layout.py's. With several ranks every rank, also rank 0, gets a value of its own. Raises OSError
    where the system has no memory for a copy, or a rank cannot open that of its node's first rank."""
    if layout.world_size == 1:
        return value
    head, sizes, descriptor = _dump(value) if layout.rank == 0 else (b"", [], -1)
    box = [(head, sizes)]
    dist.broadcast_object_list(box, src=0, group=layout.host)
    head, sizes = box[0]
    if not sizes:
        return pickle.loads(head)
    if layout.leaders is not None:
        descriptor = descriptor if layout.rank == 0 else _create(sizes)
        memory = torch.frombuffer(mmap.mmap(descriptor, _starts(sizes)[-1]), dtype=torch.uint8)
        dist.broadcast(memory, src=0, group=layout.leaders)
    # Opening a descriptor of another process in /proc creates nothing that a killed rank could leave behind.
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    path, name = layout.gather((path, os.readlink(path)) if descriptor >= 0 else None)[layout.first_of_node]
    if os.readlink(path) != name:
        raise FileNotFoundError(f"{path} is not {name}: the ranks of a node must see each other's processes")
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    dist.barrier(group=layout.host)  # descriptors stay open until here
    if descriptor >= 0:
        os.close(descriptor)
    return _load(head, sizes, opened)
