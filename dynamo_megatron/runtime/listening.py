"""On which addresses and ports this package's processes listen, and over which interface gloo connects."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import random
import socket
from collections.abc import Iterator

from dynamo_megatron.errors import InputError

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
ANOTHER_HOST = "192.0.2.1"  # RFC 5737: no host has it


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


def ranks_address() -> str:
    """Returns the address from which this host reaches rank 0; "" where there is none. On rank 0's host, where
    MASTER_ADDR may be a name for loopback, and there may be ranks on other hosts, it is that of the default route."""
    host, ranks = os.environ["MASTER_ADDR"], os.environ["WORLD_SIZE"]
    # A launcher that does not say how many ranks are here names localhost only where all are.
    here = os.environ.get("LOCAL_WORLD_SIZE", ranks if host == "localhost" else "1")
    with contextlib.suppress(OSError):
        address = address_towards(host)
        return address_towards(ANOTHER_HOST) if here != ranks and address != host and is_loopback(address) else address
    return ""


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interface_of(address: str) -> str | None:
    """The name of the network interface that has an IP address; None where there is none."""
    import psutil  # the launcher for nemo-run has none

    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family == family(address) and (
                entry.address == address or (is_loopback(entry.address) and is_loopback(address))  # all of 127.0.0.0/8
            ):
                return name
    return None


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
