"""Two hosts on one machine: network namespaces with a link between them, each with a host name of its own that its
/etc/hosts takes for loopback, as Debian's installer writes it. What makes them needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

INTERFACE, NAMES, ADDRESSES = "lan", ("first-host", "second-host"), ("10.213.77.1", "10.213.77.2")
# In namespaces of its own: the host's name, what it and the other's mean there, then the command.
ENTER = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'


class TwoHosts:
    """`folder` gets the hosts' tables. The processes that were started are ended by `close`."""

    def __init__(self, folder: Path):
        self._folder, self._started = folder, ExitStack()
        self._spaces = [f"dm{os.getpid()}-{i}" for i in range(2)]
        for name, table in zip(NAMES, self._tables(), strict=True):
            (folder / name).write_text(table)
        for space in self._spaces:
            _ip("netns", "add", space)
            self._started.callback(_ip, "netns", "del", space)
        ends = [(INTERFACE, self._spaces[0]), (INTERFACE, self._spaces[1])]
        (first, here), (second, there) = ends
        _ip("link", "add", first, "netns", here, "type", "veth", "peer", "name", second, "netns", there)
        for space, address in zip(self._spaces, ADDRESSES, strict=True):
            _ip("-n", space, "address", "add", f"{address}/24", "dev", INTERFACE)
            for link in ("lo", INTERFACE):
                _ip("-n", space, "link", "set", link, "up")

    def _tables(self) -> Iterator[str]:
        for own in NAMES:
            rows = [f"{'127.0.1.1' if name == own else a} {name}\n" for name, a in zip(NAMES, ADDRESSES, strict=True)]
            yield "127.0.0.1 localhost\n" + "".join(rows)

    def route(self) -> None:
        """Gives both hosts a default route, over the link."""
        for space in self._spaces:
            _ip("-n", space, "route", "add", "default", "dev", INTERFACE)

    def start(self, host: int, command: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen:
        """`command` on a host, its output in `log`; the process is the command's own."""
        entered = ["ip", "netns", "exec", self._spaces[host], "unshare", "--uts", "--mount", "sh", "-c", ENTER]
        with open(log, "w") as file:
            process = subprocess.Popen(
                [*entered, NAMES[host], str(self._folder / NAMES[host]), *command],
                env={**os.environ, **environment},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.callback(_end, process)
        return process

    def close(self) -> None:
        self._started.close()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=60)


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()


@contextmanager
def two_hosts(folder: Path) -> Iterator[TwoHosts | str]:
    """The hosts, or why this machine cannot make them."""
    if missing := [program for program in ("ip", "unshare") if shutil.which(program) is None]:
        yield f"there is no {missing[0]} (iproute2, util-linux)"
        return
    probe = ["unshare", "--net", "--uts", "--mount", "true"]
    if (tried := subprocess.run(probe, capture_output=True, text=True)).returncode:
        yield f"no network namespaces: {tried.stderr.strip()}"
        return
    try:
        hosts = TwoHosts(folder)
    except subprocess.CalledProcessError as error:
        yield f"no network namespaces: {error.stderr.strip()}"
        return
    try:
        yield hosts
    finally:
        hosts.close()
