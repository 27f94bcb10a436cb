"""Large arrays in memory that several processes of one host map: messages that leave such arrays where they are, and
values of rank 0 for every rank.

A step of 8,192 responses of 8k tokens has 0.8 GB of arrays. Sending them through a pipe takes seconds and makes three
copies. The memory has no name in any file system: it is gone with the processes that map it, however they end. Between
nodes arrays go as tensors. All ranks of a node map the same pages, copy-on-write: a rank that writes to an array gets
pages of its own.
"""

from __future__ import annotations

import mmap
import os
import pickle
import secrets
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, TypeVar

import numpy as np

from dynamo_megatron.runtime.late import dist, torch

T = TypeVar("T")
APART = 1 << 20  # bytes: arrays of at least this size are not part of a pickled message
_mapped: dict[int, Memory] = {}  # by the address where this process maps it


class Memory:
    """`size` bytes for one array. `descriptor`: the file descriptor of another process's memory, closed with this
    object; None: creates new memory. Raises OSError where the system refuses it."""

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        self.size, new = size, descriptor is None
        # The random name is how another process knows that it has opened this memory and no other.
        self.descriptor = os.memfd_create(f"dynamo-megatron-{secrets.token_hex(8)}") if new else descriptor
        weakref.finalize(self, os.close, self.descriptor)
        if new:
            os.posix_fallocate(self.descriptor, 0, size)

    def map(self) -> mmap.mmap:
        """Maps the bytes, writable and shared with all processes that map them."""
        mapped = mmap.mmap(self.descriptor, self.size)
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        _mapped[address] = self
        weakref.finalize(mapped, _mapped.pop, address)
        return mapped


def concatenate(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """As np.concatenate, for arrays of one dtype [N, ...]; `send` and `share` do not copy a result of at least APART
    bytes. Raises OSError as Memory does."""
    size = sum(array.nbytes for array in arrays)
    if size < APART:
        return np.concatenate(arrays)
    shape = sum(map(len, arrays)), *arrays[0].shape[1:]
    return np.concatenate(arrays, out=np.frombuffer(Memory(size).map(), arrays[0].dtype).reshape(shape))


def _dump(value: Any) -> tuple[bytes, list[Memory]]:
    """Returns `value` pickled without its contiguous arrays of at least `APART` bytes, and the memory of these arrays,
    in order: their own, or a copy. `pickle.loads(head, buffers=...)` restores the value. Raises OSError."""
    apart: list[Memory] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        """Returns whether the buffer stays in the message."""
        if buffer.raw().nbytes < APART:
            return True
        flat = np.frombuffer(buffer.raw(), np.uint8)
        own = _mapped.get(flat.ctypes.data)
        if own is None or own.size != flat.nbytes:
            own = Memory(flat.nbytes)
            np.copyto(np.frombuffer(own.map(), np.uint8), flat)
        apart.append(own)
        return False

    return pickle.dumps(value, protocol=5, buffer_callback=keep), apart


def send(connection: Connection, message: Any) -> None:
    """Sends as `connection.send` does, over a duplex pipe to a process of this host. Raises OSError."""
    head, apart = _dump(message)
    connection.send((head, [memory.size for memory in apart]))
    for memory in apart:
        send_handle(connection, memory.descriptor, None)


def receive(connection: Connection) -> Any:
    """Returns what `send` sent. Raises EOFError and OSError as `connection.recv` does."""
    head, sizes = connection.recv()
    return pickle.loads(head, buffers=[Memory(size, recv_handle(connection)).map() for size in sizes])


def share(value: T | None, layout: Any) -> T:
    """Returns on every rank the `value` of rank 0 (None elsewhere), which must be picklable; collective over all ranks.
    `layout`: policy/layout.py's.

    With several ranks every rank, also rank 0, gets a value of its own. `value` itself must not be changed any more,
    since the other ranks may read its arrays in place. Raises OSError where the system has no memory for a copy.
    """
    if layout.world_size == 1:
        return value
    head, apart = _dump(value) if layout.rank == 0 else (b"", [])
    box = [(head, [memory.size for memory in apart])]
    dist.broadcast_object_list(box, src=0, group=layout.host)
    head, sizes = box[0]
    if sizes and layout.leaders is not None:
        if layout.leaders.rank() != 0:
            apart = [Memory(size) for size in sizes]
        for memory in apart:
            dist.broadcast(torch.frombuffer(memory.map(), dtype=torch.uint8), src=0, group=layout.leaders)
    return pickle.loads(head, buffers=_within_node(apart, layout.node) if sizes else None)


def _within_node(apart: list[Memory], node: dist.ProcessGroup) -> list[mmap.mmap]:
    """Returns the bytes of the memory of the first rank of `node`, on all its ranks.

    The others open that rank's file descriptors in /proc: this creates nothing that a killed rank could leave behind.
    """
    files = [f"/proc/{os.getpid()}/fd/{memory.descriptor}" for memory in apart]
    box = [[(file, os.readlink(file), memory.size) for file, memory in zip(files, apart, strict=True)]]
    dist.broadcast_object_list(box, src=dist.get_global_rank(node, 0), group=node)
    buffers = [_open(*place) for place in box[0]]
    dist.barrier(group=node)  # the first rank keeps its descriptors open until here
    return buffers


def _open(path: str, name: str, size: int) -> mmap.mmap:
    """Maps the memory `name`, copy-on-write. Raises OSError where this process cannot open it."""
    if os.readlink(path) != name:
        raise FileNotFoundError(f"{path} is not {name}: the ranks of a node must see each other's processes")
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
