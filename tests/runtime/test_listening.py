"""Where the ranks' store and gloo listen: loopback, or the interface between the hosts."""

import datetime
import socket

import psutil
import pytest
import torch.distributed as dist

from dynamo_megatron.runtime import listening as addresses
from dynamo_megatron.runtime.coordination import connect_store
from dynamo_megatron.runtime.listening import address_of, store_address


def listening() -> set[str]:
    return {c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}


@pytest.fixture
def rank_0(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return monkeypatch


@pytest.mark.parametrize(("host", "address"), [("localhost", "127.0.0.1"), ("::1", "::1")])
def test_the_ranks_store_listens_on_one_address(rank_0, host, address):
    rank_0.setenv("MASTER_ADDR", host)
    before = listening()
    store = connect_store(60)
    assert listening() - before <= {address} and address in listening()
    store.set("a", "b")
    other = dist.TCPStore(host, store.port, is_master=False, timeout=datetime.timedelta(seconds=60))
    assert other.get("a") == b"b"


def test_an_address_of_another_host_and_a_taken_port_are_refused(rank_0):
    rank_0.setenv("MASTER_ADDR", "198.51.100.7")  # of RFC 5737: nobody's
    with pytest.raises(ValueError, match=r"MASTER_ADDR: rank 0 cannot listen at 198\.51\.100\.7:0 "):
        connect_store(60)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        rank_0.setenv("MASTER_ADDR", "127.0.0.1")
        rank_0.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with pytest.raises(ValueError, match="Address already in use"):
            connect_store(60)


@pytest.fixture
def node0(rank_0):
    """MASTER_ADDR is this host's name, which its own /etc/hosts has as Debian's installer leaves it."""
    rank_0.setenv("MASTER_ADDR", "node0")
    rank_0.setattr(addresses, "address_of", lambda host: {"node0": "127.0.1.1"}.get(host) or address_of(host))
    return rank_0


@pytest.mark.parametrize(
    ("host", "local", "ranks", "address"),
    [
        ("node0", None, "2", ""),  # a launcher that does not say which ranks are here
        ("node0", "1", "2", ""),
        ("node0", "2", "2", "127.0.1.1"),
        ("node0", None, "1", "127.0.1.1"),
        ("localhost", None, "2", "127.0.0.1"),
        ("localhost", "1", "2", ""),
        ("127.0.0.1", None, "2", "127.0.0.1"),
    ],
)
def test_loopback_is_for_ranks_of_one_host(node0, host, local, ranks, address):
    node0.setenv("MASTER_ADDR", host)
    node0.setenv("WORLD_SIZE", ranks)
    node0.delenv("LOCAL_WORLD_SIZE")
    if local is not None:
        node0.setenv("LOCAL_WORLD_SIZE", local)
    assert store_address() == address
