"""Messages with large arrays between two processes of one host: the arrays go through memory that both map.

A step of 8,192 responses of 8k tokens has 0.8 GB of arrays, which a pipe takes seconds for and three copies of. The
memory has no name: it is gone with the processes, however they end.
"""

from __future__ import annotations

import mmap
import os
import pickle
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

APART = 1 << 20  # bytes from which on an array is not part of the message itself
ALIGNMENT = 64  # bytes


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
    sizes = [array.nbytes for array in arrays]
    connection.send((head, sizes))
    if not sizes:
        return
    descriptor = os.memfd_create("dynamo-megatron", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, sum(map(_padded, sizes)))
        with mmap.mmap(descriptor, 0) as memory:
            start = 0
            for array in arrays:
                memory[start : start + array.nbytes] = array
                start += _padded(array.nbytes)
        send_handle(connection, descriptor, None)
    finally:
        os.close(descriptor)


def receive(connection: Connection) -> Any:
    """What `send` sent. Raises EOFError and OSError as `connection.recv`."""
    head, sizes = connection.recv()
    if not sizes:
        return pickle.loads(head)
    descriptor = recv_handle(connection)
    try:
        memory = memoryview(mmap.mmap(descriptor, 0))  # lives as long as an array in it does
    finally:
        os.close(descriptor)
    arrays, start = [], 0
    for size in sizes:
        arrays.append(memory[start : start + size])
        start += _padded(size)
    return pickle.loads(head, buffers=arrays)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
