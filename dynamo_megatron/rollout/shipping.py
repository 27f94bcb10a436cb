"""Messages between two processes of one host, their large arrays in memory that both map (arena.py)."""

from __future__ import annotations

import pickle
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

from dynamo_megatron.runtime.arena import Arena, Piece, dump


def send(connection: Connection, message: Any) -> None:
    """As `connection.send`, of a duplex pipe. Raises OSError."""
    head, pieces = dump(message)
    connection.send((head, [(piece.start, piece.size) for piece in pieces]))
    for piece in pieces:
        send_handle(connection, piece.arena.descriptor, None)


def receive(connection: Connection) -> Any:
    """What `send` sent. Raises EOFError and OSError as `connection.recv`."""
    head, places = connection.recv()
    return pickle.loads(head, buffers=[Piece(Arena(recv_handle(connection)), *place).map() for place in places])
