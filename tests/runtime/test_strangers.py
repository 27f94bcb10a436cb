"""A stranger who reaches the ranks' store: no rank acts on what it writes there."""

import datetime
import errno
import hmac
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from dynamo_megatron.runtime import signed_store

RANK = """
import os, sys, time
from pathlib import Path
from dynamo_megatron.runtime.coordination import Coordinator, RemoteFailure, StopFlag, connect_store
from dynamo_megatron.runtime.signed_store import share_secret

rank = int(os.environ["RANK"])
store = connect_store(60)
coordinator = Coordinator(store, rank, StopFlag(), share_secret(store, Path(sys.argv[1]), rank, 60))
coordinator.announce(f"up-{rank}")
coordinator.wait(f"up-{1 - rank}", "the other rank", 60)
print("up", flush=True)
sys.stdin.readline()  # until the stranger has done its worst
try:
    coordinator.check()
    if rank == 0:
        coordinator.announce("go-on")
    elif coordinator.wait("go-on", "rank 0", 60) == "ready":
        coordinator.fail("an honest failure")
    coordinator.wait("never", "nothing", 60)
except RemoteFailure as failure:
    print(repr(str(failure)), flush=True)
"""


def start(rank: int, folder, port: int) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", RANK, str(folder)],
        env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def ranks(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = [start(rank, tmp_path, port) for rank in (0, 1)]
    yield started, port
    for rank in started:
        rank.kill()
        rank.communicate()


@pytest.mark.full
def test_what_a_stranger_writes_into_the_store_is_ignored(ranks, tmp_path):
    (first, second), port = ranks
    assert [rank.stdout.readline() for rank in (first, second)] == ["up\n", "up\n"]
    assert (tmp_path / ".ranks").stat().st_mode & 0o777 == 0o600
    stranger = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=10))
    stranger.wait(["coordination-0/heartbeat"])
    beat = stranger.get("coordination-0/heartbeat")
    names = ("abort", "stop", "stalled", "go-on")
    for name in names:
        stranger.set(f"coordination-0/{name}", "\x1b[2Jall is lost")
    for name in names:  # a rank's own value, under another key
        stranger.set(f"coordination-0/{name}", beat)
    time.sleep(4)  # the watchdogs look every second
    assert [rank.poll() for rank in (first, second)] == [None, None]
    for rank in (first, second):
        rank.stdin.write("\n")
        rank.stdin.flush()
    assert first.stdout.readline() == "'an honest failure'\n", "a rank's own message gets past the stranger's"
    first.kill()
    assert first.communicate()[1].count("the ranks' store at 127.0.0.1 has values that no rank has signed") == 1


def test_a_rank_that_does_not_see_the_folder_of_rank_0_says_so(tmp_path):
    from dynamo_megatron.runtime.signed_store import share_secret

    store = dist.HashStore()
    share_secret(store, tmp_path / "here", 0, 1)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / ".ranks").write_bytes(b"of an earlier start")
    with pytest.raises(
        TimeoutError, match=r"rank 1 waited 0\.2 s for what rank 0 writes to .*there/\.ranks: all nodes"
    ):
        share_secret(store, tmp_path / "there", 1, 0.2)
    assert share_secret(store, tmp_path / "here", 1, 1) == (tmp_path / "here" / ".ranks").read_bytes()


@pytest.mark.parametrize("there", [None, b"", b"guessed"])
def test_no_rank_takes_a_secret_that_a_stranger_can_guess(tmp_path, there):
    from dynamo_megatron.runtime.signed_store import share_secret

    store = dist.HashStore()
    store.set("coordination-0/proof", hmac.digest(there or b"", b"proof", "sha256").hex())
    if there is not None:
        (tmp_path / ".ranks").write_bytes(there)
    with pytest.raises(TimeoutError):
        share_secret(store, tmp_path, 1, 0.2)


def test_a_secret_is_not_written_through_a_link(tmp_path):
    from dynamo_megatron.runtime.signed_store import share_secret

    (tmp_path / ".ranks").symlink_to(tmp_path / "elsewhere")
    share_secret(dist.HashStore(), tmp_path, 0, 1)
    assert not (tmp_path / "elsewhere").exists() and not (tmp_path / ".ranks").is_symlink()


class Fleeting(type(Path())):
    """Goes between a look and the reading, as an earlier start's file does that rank 0 takes away."""

    errors = ()

    def open(self, *words, **options):
        if self.name == ".ranks" and self.errors:
            raise OSError(self.errors.pop(), "gone")
        return super().open(*words, **options)


def test_the_secret_of_an_earlier_start_may_go_while_a_rank_reads_it(tmp_path, monkeypatch):
    store = dist.HashStore()
    secret = signed_store.share_secret(store, tmp_path, 0, 1)
    monkeypatch.setattr(Fleeting, "errors", [errno.ENOENT, errno.ESTALE])
    assert signed_store.share_secret(store, Fleeting(tmp_path), 1, 20) == secret and not Fleeting.errors


class Unseen(type(Path())):
    def stat(self, **_):
        raise AssertionError("a network's file system remembers that the file was not there")

    open = stat


def test_no_rank_looks_for_the_secret_before_it_is_there(tmp_path):
    with pytest.raises(TimeoutError):
        signed_store.share_secret(dist.HashStore(), Unseen(tmp_path), 1, 0.2)
