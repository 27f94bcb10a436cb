"""Finds free ports. Imports no other package: launchers also run in environments that have few."""

from __future__ import annotations

import contextlib
import random
import socket

from dynamo_megatron.errors import InputError


def free_port(count: int = 1) -> int:
    """Returns a free port, or the first of `count` free ones in a row, to listen on later. It is below the range from
    which Linux by default takes the ports of outgoing connections. Raises InputError."""
    for port in random.SystemRandom().sample(range(12000, 32000), 100):
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for i in range(count):
                probes.enter_context(socket.socket()).bind(("", port + i))
            return port
    raise InputError("100 ports between 12000 and 32000 are all taken on this machine; end what listens there")
