"""Where the ranks meet, and over which interface gloo connects."""

import datetime
import socket
import subprocess
import sys

import pytest
import torch.distributed as dist

from dynamo_megatron.runtime import listening as addresses
from dynamo_megatron.runtime.coordination import connect_store
from dynamo_megatron.runtime.listening import address_towards, interface_of, ranks_address


@pytest.fixture
def rank_0(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return monkeypatch


@pytest.mark.parametrize("host", ["localhost", "::1"])
def test_the_ranks_meet_in_rank_0s_store(rank_0, host):
    rank_0.setenv("MASTER_ADDR", host)
    store = connect_store(10)
    store.set("a", "b")
    other = dist.TCPStore(host, store.port, is_master=False, timeout=datetime.timedelta(seconds=10))
    assert other.get("a") == b"b"


def test_an_address_of_another_host_and_a_taken_port_are_refused(rank_0):
    rank_0.setenv("MASTER_ADDR", "198.51.100.7")  # of RFC 5737: nobody's
    with pytest.raises(ValueError, match=r"MASTER_ADDR: rank 0 cannot listen at 198\.51\.100\.7:0 "):
        connect_store(10)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        rank_0.setenv("MASTER_ADDR", "127.0.0.1")
        rank_0.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with pytest.raises(ValueError, match="Address already in use"):
            connect_store(10)


@pytest.mark.parametrize(
    ("host", "local", "ranks", "loopback"),
    [
        ("node0", None, "2", False),  # a launcher that does not say which ranks are here
        ("node0", "1", "2", False),
        ("node0", "2", "2", True),
        ("node0", None, "1", True),
        ("localhost", None, "2", True),
        ("localhost", "1", "2", False),
        ("127.0.0.1", None, "2", True),
    ],
)
def test_loopback_is_for_ranks_of_one_host(rank_0, host, local, ranks, loopback):
    """node0 is this host's name, which its own /etc/hosts has as Debian's installer leaves it."""
    towards = {"node0": "127.0.1.1", addresses.ANOTHER_HOST: "10.0.0.5"}
    rank_0.setattr(addresses, "address_towards", lambda host: towards.get(host) or address_towards(host))
    rank_0.setenv("MASTER_ADDR", host)
    rank_0.setenv("WORLD_SIZE", ranks)
    rank_0.delenv("LOCAL_WORLD_SIZE")
    if local is not None:
        rank_0.setenv("LOCAL_WORLD_SIZE", local)
    assert ranks_address().startswith("127.") == loopback


GROUP = """
import datetime, os, psutil, torch, torch.distributed as dist
from dynamo_megatron.runtime.listening import gloo_listens_on
with gloo_listens_on("127.0.0.1"):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print({c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"})
"""


def test_gloo_listens_on_the_interface_towards_the_others():
    said = subprocess.run([sys.executable, "-P", "-c", GROUP], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout == "{'127.0.0.1'}\n"
    assert interface_of("127.0.0.2") == interface_of("127.0.0.1") and interface_of("198.51.100.7") is None
