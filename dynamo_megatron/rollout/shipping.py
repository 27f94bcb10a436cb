"""Messages with large arrays between two processes of one host: the arrays go through memory that both map.

A step of 8,192 responses of 8k tokens has 0.8 GB of arrays, which a pipe takes seconds for and three copies of. The
memory has no name: it is gone with the processes, however they end.
"""

from __future__ import annotations

import mmap
import os
import pickle
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import numpy as np

APART = 1 << 20  # bytes from which on an array is not part of the message itself
ZEROS = bytes(1 << 20)
_shared: dict[int, tuple[Arena, int, int]] = {}  # address of an array in an arena -> the arena, start, bytes


class Arena:
    """Memory for arrays that `send` passes on as they are, taken from the system by and by; it goes with the last array
    in it, on either side.

    The first use of 0.8 GB can take a virtual machine five seconds, which a step's end would wait for.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("dynamo-megatron", os.MFD_CLOEXEC)
        self._taken = self._used = 0  # bytes
        weakref.finalize(self, os.close, self.descriptor)

    def grow(self, size: int) -> None:
        """By `size` bytes. Raises OSError where the system refuses them."""
        end = self._taken + size
        while self._taken < end:  # fallocate would leave the clearing of pages, the slow part, to their first use
            self._taken += os.pwrite(self.descriptor, ZEROS[: end - self._taken], self._taken)

    def concatenate(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """As np.concatenate, of arrays of one dtype [N, ...]; a large result is in here, which grows if it has to."""
        shape = (sum(map(len, arrays)), *arrays[0].shape[1:])
        dtype = arrays[0].dtype
        size = int(np.prod(shape)) * dtype.itemsize
        if size < APART:
            return np.concatenate(arrays)
        start = -(-self._used // mmap.PAGESIZE) * mmap.PAGESIZE
        self._used = start + size
        if self._used > self._taken:
            self.grow(self._used - self._taken)
        mapped = mmap.mmap(self.descriptor, size, offset=start)
        joined = np.frombuffer(mapped, dtype).reshape(shape)
        _shared[joined.ctypes.data] = self, start, size
        weakref.finalize(mapped, _shared.pop, joined.ctypes.data)
        return np.concatenate(arrays, out=joined)


def send(connection: Connection, message: Any) -> None:
    """As `connection.send`, of a duplex pipe. Raises OSError."""
    arrays: list[memoryview] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        """Whether it stays in the message."""
        if buffer.raw().nbytes < APART:
            return True
        arrays.append(buffer.raw())
        return False

    head = pickle.dumps(message, protocol=5, buffer_callback=keep)
    places = [_place(array) for array in arrays]
    connection.send((head, [(start, size) for _, start, size in places]))
    for arena, _, _ in places:
        send_handle(connection, arena.descriptor, None)


def receive(connection: Connection) -> Any:
    """What `send` sent. Raises EOFError and OSError as `connection.recv`."""
    head, places = connection.recv()
    arrays = []
    for start, size in places:
        descriptor = recv_handle(connection)
        try:
            arrays.append(mmap.mmap(descriptor, size, offset=start))  # lives as long as the array in it does
        finally:
            os.close(descriptor)
    return pickle.loads(head, buffers=arrays)


def _place(array: memoryview) -> tuple[Arena, int, int]:
    """Where the array's bytes are, its own or a copy of them: arena, start, bytes."""
    flat = np.frombuffer(array, np.uint8)
    own = _shared.get(flat.ctypes.data)
    if own is not None and own[2] == flat.nbytes:
        return own
    arena = Arena()
    arena.concatenate([flat])
    return arena, 0, flat.nbytes
