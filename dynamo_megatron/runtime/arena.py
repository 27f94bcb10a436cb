"""Memory for large arrays that several processes of one host map, and messages that leave such arrays where they are.

A step of 8,192 responses of 8k tokens has 0.8 GB of arrays. Sending them through a pipe takes seconds and makes three
copies. The memory has no name in any file system: it is gone with the processes that map it, however they end.
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
from typing import Any, NamedTuple

import numpy as np

APART = 1 << 20  # bytes: arrays of at least this size are not part of a pickled message
ZEROS = bytes(1 << 20)
_pieces: dict[int, Piece] = {}  # by the address where this process maps them


class Arena:
    """Memory that is taken from the system bit by bit, since using 0.8 GB for the first time can take a virtual machine
    five seconds. It is freed with the last array in it, in any process."""

    def __init__(self, descriptor: int | None = None) -> None:
        """`descriptor`: the file descriptor of another process's arena, closed with this object. None: creates new
        memory."""
        if descriptor is None:
            # The random name is how another process knows that it has opened this memory and no other.
            descriptor = os.memfd_create(f"dynamo-megatron-{secrets.token_hex(8)}", os.MFD_CLOEXEC)
        self.descriptor = descriptor
        self._taken = self._used = 0  # bytes
        weakref.finalize(self, os.close, descriptor)

    def grow(self, size: int) -> None:
        """Takes `size` more bytes. Raises OSError where the system refuses them."""
        end = self._taken + size
        while self._taken < end:  # fallocate would leave the clearing of pages, the slow part, to their first use
            self._taken += os.pwrite(self.descriptor, ZEROS[: end - self._taken], self._taken)

    def take(self, size: int) -> Piece:
        """Returns the next `size` bytes, from a page boundary on; the arena grows if it has to. Raises OSError as
        `grow` does."""
        start = -(-self._used // mmap.PAGESIZE) * mmap.PAGESIZE
        self._used = start + size
        self.grow(self._used - self._taken)
        return Piece(self, start, size)

    def concatenate(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """As np.concatenate, for arrays of one dtype [N, ...]. A result of at least APART bytes is in this arena, which
        grows if it has to."""
        size = sum(array.nbytes for array in arrays)
        if size < APART:
            return np.concatenate(arrays)
        shape = sum(map(len, arrays)), *arrays[0].shape[1:]
        return np.concatenate(arrays, out=np.frombuffer(self.take(size).map(), arrays[0].dtype).reshape(shape))


class Piece(NamedTuple):
    """One array's bytes."""

    arena: Arena
    start: int
    size: int

    def map(self) -> mmap.mmap:
        """Maps the bytes, writable and shared with all processes that map them. `dump` does not copy an array that
        covers them."""
        mapped = mmap.mmap(self.arena.descriptor, self.size, offset=self.start)
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        _pieces[address] = self
        weakref.finalize(mapped, _pieces.pop, address)
        return mapped


def dump(value: Any) -> tuple[bytes, list[Piece]]:
    """Returns `value` pickled without its contiguous arrays of at least `APART` bytes, and the pieces that hold these
    arrays, in order. An array that is in an arena stays there; others are copied to new arenas. `pickle.loads(head,
    buffers=...)` restores the value. Raises OSError as `Arena.grow` does."""
    pieces: list[Piece] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        """Returns whether the buffer stays in the message."""
        if buffer.raw().nbytes < APART:
            return True
        flat = np.frombuffer(buffer.raw(), np.uint8)
        own = _pieces.get(flat.ctypes.data)
        if own is None or own.size != flat.nbytes:
            own = Arena().take(flat.nbytes)
            np.copyto(np.frombuffer(own.map(), np.uint8), flat)
        pieces.append(own)
        return False

    return pickle.dumps(value, protocol=5, buffer_callback=keep), pieces


def send(connection: Connection, message: Any) -> None:
    """Sends as `connection.send` does, over a duplex pipe to a process of this host. Raises OSError."""
    head, pieces = dump(message)
    connection.send((head, [(piece.start, piece.size) for piece in pieces]))
    for piece in pieces:
        send_handle(connection, piece.arena.descriptor, None)


def receive(connection: Connection) -> Any:
    """Returns what `send` sent. Raises EOFError and OSError as `connection.recv` does."""
    head, places = connection.recv()
    return pickle.loads(head, buffers=[Piece(Arena(recv_handle(connection)), *place).map() for place in places])
