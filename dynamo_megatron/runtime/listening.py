"""Decides on which address this package's processes listen: torch's stores, and gloo, which opens a socket for each
group.

torch's own TCPStore listens on every interface, and gloo on whatever the host's name resolves to. Here both listen only
on the address that the processes that connect were given.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import random
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dynamo_megatron.errors import InputError

if TYPE_CHECKING:
    import torch.distributed as dist

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
ANOTHER_HOST = "192.0.2.1"  # RFC 5737: no host has it


def serve_store(address: str, port: int, timeout: float) -> dist.TCPStore:
    """Serves a store on `address`, an IP address of this host ("": on all of them), at `port` (0: a free one). Raises
    OSError where it cannot listen there."""
    import torch.distributed as dist  # not above: the rollout process imports this module, but not torch

    listener = socket.create_server((address, port), family=family(address))
    return dist.TCPStore(
        address or "127.0.0.1",
        listener.getsockname()[1],
        is_master=True,
        timeout=datetime.timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def free_port(count: int = 1) -> int:
    """Returns a free port, or the first of `count` free ones in a row, to listen on later. It is below the range from
    which Linux by default takes the ports of outgoing connections. Raises InputError."""
    for port in random.SystemRandom().sample(range(12000, 32000), 100):
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for i in range(count):
                probes.enter_context(socket.socket()).bind(("", port + i))
            return port
    raise InputError("100 ports between 12000 and 32000 are all taken on this machine; end what listens there")


def check_port(host: str, port: int, key: str) -> None:
    """Raises InputError, which names `key`, where this process cannot listen at the port."""
    with socket.socket(family(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise InputError(
                f"{key}: port {port} cannot be used ({error.strerror}); free it, name another one, or leave it out"
            ) from None


def address_of(host: str) -> str:
    """Returns the IP address, IPv4 if there is one, that a name has on this host. Raises OSError for an unknown
    name."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0]


def address_towards(host: str) -> str:
    """Returns the address from which this host reaches another one. Raises OSError for an unknown host."""
    there = address_of(host)
    with socket.socket(family(there), socket.SOCK_DGRAM) as probe:
        probe.connect((there, 9))  # sends nothing
        return probe.getsockname()[0]


def store_address() -> str:
    """Returns the address that MASTER_ADDR has on this host; "" where it is a name for loopback here and there may be
    ranks on other hosts, on which the name has another address. Raises OSError for an unknown name."""
    host, ranks = os.environ["MASTER_ADDR"], os.environ["WORLD_SIZE"]
    address = address_of(host)
    # A launcher that does not say how many ranks are here names localhost only where all are.
    here = os.environ.get("LOCAL_WORLD_SIZE", ranks if host == "localhost" else "1")
    return "" if here != ranks and address != host and is_loopback(address) else address


def ranks_address() -> str:
    """Returns the address from which this host reaches rank 0. On rank 0's host, where `store_address` is "", returns
    that of the default route, or "" where there is none."""
    with contextlib.suppress(OSError):
        return address_towards(store_address() or ANOTHER_HOST)
    return ""


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interface_of(address: str) -> str | None:
    """The name of the network interface that has an IP address; None where there is none."""
    import psutil  # the launcher for nemo-run has none

    entries = [(name, entry) for name, found in psutil.net_if_addrs().items() for entry in found]
    own = [(name, entry.address) for name, entry in entries if entry.family == family(address)]
    # A loopback interface has all of 127.0.0.0/8.
    return next((name for name, a in own if a == address or (is_loopback(a) and is_loopback(address))), None)


@contextlib.contextmanager
def gloo_listens_on(address: str) -> Iterator[None]:
    """Groups of gloo that are created in this context listen on the interface of `address`, an IP address of this host
    ("": on the one that gloo chooses), unless the user has named one (GLOO_SOCKET_IFNAME)."""
    interface = interface_of(address) if address else None
    if interface is None or GLOO_INTERFACE in os.environ:
        yield
        return
    os.environ[GLOO_INTERFACE] = interface
    try:
        yield
    finally:
        del os.environ[GLOO_INTERFACE]


def family(address: str) -> socket.AddressFamily:
    """Of an IP address; IPv4 for "", which stands for all."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def http_url(address: str, port: int) -> str:
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
