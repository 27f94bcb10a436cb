"""Gives every rank a value of rank 0. Its large arrays go through memory that the ranks of a node map, and as tensors
from node to node. Only the rest of the value is a pickled message.

All ranks of a node map the same pages, copy-on-write: a rank that writes to an array gets pages of its own.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from dynamo_megatron.runtime.arena import Arena, Piece, dump

T = TypeVar("T")


class Ranks(Protocol):
    """A rank's place and its groups for objects, as policy/layout.py has them."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def host(self) -> dist.ProcessGroup: ...
    @property
    def node(self) -> dist.ProcessGroup: ...
    @property
    def leaders(self) -> dist.ProcessGroup | None: ...


def share(value: T | None, layout: Ranks) -> T:
    """Returns on every rank the `value` of rank 0 (None elsewhere), which must be picklable; collective over all ranks.

    With several ranks every rank, also rank 0, gets a value of its own. `value` itself must not be changed any more,
    since the other ranks may read its arrays in place. Raises OSError where the system has no memory for a copy.
    """
    if layout.world_size == 1:
        return value
    head, pieces = dump(value) if layout.rank == 0 else (b"", [])
    box = [(head, [piece.size for piece in pieces])]
    dist.broadcast_object_list(box, src=0, group=layout.host)
    head, sizes = box[0]
    if sizes and layout.leaders is not None:
        pieces = _between_nodes(pieces, sizes, layout.leaders)
    return pickle.loads(head, buffers=_within_node(pieces, sizes, layout.node) if sizes else None)


def _between_nodes(pieces: list[Piece], sizes: list[int], leaders: dist.ProcessGroup) -> list[Piece]:
    """Returns rank 0's pieces; on the other leaders (the first ranks of nodes), new pieces with the same bytes."""
    if leaders.rank() != 0:
        arena = Arena()
        pieces = [arena.take(size) for size in sizes]
    for piece in pieces:
        dist.broadcast(_bytes(piece.map()), src=0, group=leaders)
    return pieces


def _within_node(pieces: list[Piece], sizes: list[int], node: dist.ProcessGroup) -> list[Any]:
    """Returns the bytes of the pieces of the first rank of `node`, on all its ranks."""
    first = dist.get_global_rank(node, 0)
    box: list[list[_Address]] = [[]]
    with contextlib.suppress(OSError):  # no /proc: the others find nothing to open
        box = [[_Address.of(piece) for piece in pieces]]
    dist.broadcast_object_list(box, src=first, group=node)
    buffers: list[Any] = [_copy_on_write(piece.arena.descriptor, piece.start, piece.size) for piece in pieces]
    if node.rank() != 0:
        with contextlib.suppress(OSError):
            buffers = [address.open() for address in box[0]]
    # The first rank keeps its descriptors open until here.
    opened = torch.tensor(len(buffers), dtype=torch.int32)
    dist.all_reduce(opened, dist.ReduceOp.MIN, group=node)
    if int(opened) == len(sizes):
        return buffers
    if node.rank() != 0:
        buffers = [bytearray(size) for size in sizes]
    for buffer in buffers:
        dist.broadcast(_bytes(buffer), src=first, group=node)
    return buffers


class _Address(NamedTuple):
    """Where the other processes of a node find a piece: at a descriptor of the process that has it, in /proc.

    This creates nothing that a killed rank could leave behind, and nothing listens, as passing descriptors through a
    socket would need. Another user, or a process with another view of process ids, finds nothing there, or memory of
    another name.
    """

    path: str
    name: str
    start: int
    size: int

    @classmethod
    def of(cls, piece: Piece) -> _Address:
        path = f"/proc/{os.getpid()}/fd/{piece.arena.descriptor}"
        return cls(path, os.readlink(path), piece.start, piece.size)

    def open(self) -> mmap.mmap:
        """Maps the bytes, copy-on-write. Raises OSError where this process cannot open them."""
        if os.readlink(self.path) != self.name:
            raise FileNotFoundError(f"{self.path} is not {self.name}")
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _copy_on_write(descriptor, self.start, self.size)
        finally:
            os.close(descriptor)


def _copy_on_write(descriptor: int, start: int, size: int) -> mmap.mmap:
    return mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY, offset=start)


def _bytes(buffer: Any) -> torch.Tensor:
    """Returns a uint8 tensor over the memory of `buffer`."""
    return torch.frombuffer(buffer, dtype=torch.uint8)
