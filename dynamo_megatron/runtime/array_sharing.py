"""Gives every rank a value of rank 0. Its large arrays go through memory that the ranks of a node map, and as tensors
from node to node. Only the rest of the value is a pickled message.

All ranks of a node map the same pages, copy-on-write: a rank that writes to an array gets pages of its own.
"""

from __future__ import annotations

import mmap
import os
import pickle
from typing import Any, TypeVar

from dynamo_megatron.runtime.arena import Arena, Piece, dump
from dynamo_megatron.runtime.late import dist, torch

T = TypeVar("T")


def share(value: T | None, layout: Any) -> T:
    """Returns on every rank the `value` of rank 0 (None elsewhere), which must be picklable; collective over all ranks.
    `layout`: policy/layout.py's.

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
    return pickle.loads(head, buffers=_within_node(pieces, layout.node) if sizes else None)


def _between_nodes(pieces: list[Piece], sizes: list[int], leaders: dist.ProcessGroup) -> list[Piece]:
    """Returns rank 0's pieces; on the other leaders (the first ranks of nodes), new pieces with the same bytes."""
    if leaders.rank() != 0:
        arena = Arena()
        pieces = [arena.take(size) for size in sizes]
    for piece in pieces:
        dist.broadcast(torch.frombuffer(piece.map(), dtype=torch.uint8), src=0, group=leaders)
    return pieces


def _within_node(pieces: list[Piece], node: dist.ProcessGroup) -> list[Any]:
    """Returns the bytes of the pieces of the first rank of `node`, on all its ranks.

    The others open that rank's file descriptors in /proc: this creates nothing that a killed rank could leave behind.
    """
    folder = f"/proc/{os.getpid()}/fd"
    places = [(p.arena.descriptor, os.readlink(f"{folder}/{p.arena.descriptor}"), p.start, p.size) for p in pieces]
    box = [(folder, places)]
    dist.broadcast_object_list(box, src=dist.get_global_rank(node, 0), group=node)
    folder, places = box[0]
    buffers = [_open(f"{folder}/{descriptor}", *place) for descriptor, *place in places]
    dist.barrier(group=node)  # the first rank keeps its descriptors open until here
    return buffers


def _open(path: str, name: str, start: int, size: int) -> mmap.mmap:
    """Maps bytes of the memory `name`, copy-on-write. Raises OSError where this process cannot open them."""
    if os.readlink(path) != name:
        raise FileNotFoundError(f"{path} is not {name}: the ranks of a node must see each other's processes")
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, size, offset=start, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
