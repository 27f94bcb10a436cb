"""Messages between two processes of one host. Large arrays are in memory that both processes map (arena.py)."""

from __future__ import annotations

import pickle
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

from dynamo_megatron.runtime.arena import Arena, Piece, dump


def send(connection: Connection, message: Any) -> None:
    """Sends as `connection.send` does, over a duplex pipe. Raises OSError."""
    head, pieces = dump(message)
    connection.send((head, [(piece.start, piece.size) for piece in pieces]))
    for piece in pieces:
        send_handle(connection, piece.arena.descriptor, None)


def receive(connection: Connection) -> Any:
    """Returns what `send` sent. Raises EOFError and OSError as `connection.recv` does."""
    head, places = connection.recv()
    return pickle.loads(head, buffers=[Piece(Arena(recv_handle(connection)), *place).map() for place in places])
