"""Servers of other nodes, by files in `output_dir/servers/` that all nodes see.

The controller (the rollout process of rank 0) writes `run.json`: a token of this run, and which incarnations of servers
are to be restarted. Each node's `serve` writes `NAME.json` with that token: the server's Endpoint, or why it is gone.
Who is alive touches its files; the reader compares a file's time with the one it saw before, never with its own clock,
so that the nodes' clocks need not agree and an older run's files are never taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import secrets
import socket
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dynamo_megatron.rollout.endpoint import Endpoint
from dynamo_megatron.rollout.supervisor import Listener, Supervisor

BEAT_EVERY = 1.0  # seconds
SILENCE = 20.0  # seconds without a beat until the other side counts as gone
RUN = "run.json"


def servers_folder(output_dir: str | os.PathLike) -> Path:
    return Path(output_dir) / "servers"


class Announced:
    """The controller's side: tells `listener` of the servers `names` as their nodes announce them."""

    def __init__(self, output_dir: str | os.PathLike, names: Collection[str], listener: Listener):
        self._folder, self._names, self._listener = servers_folder(output_dir), names, listener
        self._token = secrets.token_hex(16)
        self._condemned: dict[str, tuple[int, str]] = {}

    def condemn(self, name: str, incarnation: int, why: str) -> None:
        """Has this incarnation of the server, or an earlier one, restarted by its node."""
        self._condemned[name] = incarnation, why
        self._say()

    async def run(self) -> None:
        """For ever; cancel it, and the nodes' servers end."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._say()
        files = {name: _Watched(self._folder / f"{name}.json") for name in self._names}
        heard: dict[str, tuple[int, bool]] = {}  # what the listener knows: name -> incarnation, whether it is up
        try:
            while True:
                (self._folder / RUN).touch()
                for name, file in files.items():
                    said = file.read()
                    if said is None or said["token"] != self._token:
                        continue
                    now = said["incarnation"], "endpoint" in said and file.silence < SILENCE
                    if now == heard.get(name):
                        continue
                    heard[name] = now
                    if now[1] and unreachable(said):
                        why = f"{said['endpoint']['url']} is for {said['host']} alone; name its interface: rollout.host"
                        self._listener.down(name, why, True)
                    elif now[1]:
                        self._listener.up(Endpoint(**said["endpoint"]))
                    else:
                        silent = f"its node has given no sign of life for {SILENCE:g} s ({file.path})"
                        self._listener.down(name, said.get("why", silent), said.get("final", False))
                await asyncio.sleep(BEAT_EVERY)
        finally:
            for path in (self._folder / RUN, *(f.path for f in files.values())):
                path.unlink(missing_ok=True)

    def _say(self) -> None:
        _write(self._folder / RUN, {"token": self._token, "condemned": self._condemned})


def unreachable(said: dict[str, Any]) -> bool:
    """Whether another node's server listens on that node's loopback."""
    return said["host"] != socket.gethostname() and urlsplit(said["endpoint"]["url"]).hostname.startswith("127.")


class NodeSide:
    """A node's side: what its Supervisor tells goes into files. `join` first."""

    def __init__(self, output_dir: str | os.PathLike, names: Collection[str]):
        self._folder, self._names = servers_folder(output_dir), names
        self._run = _Watched(self._folder / RUN)
        self._token = ""
        self._incarnations = dict.fromkeys(names, 0)

    def up(self, endpoint: Endpoint) -> None:
        self._incarnations[endpoint.name] = endpoint.incarnation
        self._say(endpoint.name, endpoint.incarnation, {"endpoint": dataclasses.asdict(endpoint)})

    def down(self, name: str, why: str, final: bool) -> None:
        self._incarnations[name] += 1  # a start that failed was an incarnation that nobody saw
        self._say(name, self._incarnations[name], {"why": why, "final": final})

    async def join(self, timeout: float) -> None:
        """Waits for a run that beats. Raises TimeoutError."""
        deadline = time.monotonic() + timeout
        while (said := self._run.read()) is None or not self._run.beats:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no run has shown itself in {self._folder} within {timeout:g} s")
            await asyncio.sleep(BEAT_EVERY)
        self._token = said["token"]

    async def run(self, supervisor: Supervisor) -> None:
        """Beats, and passes on what the controller wants restarted; returns when the run has ended."""
        while True:
            said = self._run.read()
            if said is None or said["token"] != self._token or self._run.silence > SILENCE:
                return
            for name, (incarnation, why) in said["condemned"].items():
                if name in self._incarnations:
                    supervisor.condemn(name, incarnation, why)
            for name in self._names:
                with contextlib.suppress(FileNotFoundError):
                    os.utime(self._folder / f"{name}.json")
            await asyncio.sleep(BEAT_EVERY)

    def leave(self) -> None:
        """Takes back what it has said."""
        for name in self._names:
            (self._folder / f"{name}.json").unlink(missing_ok=True)

    def _say(self, name: str, incarnation: int, what: dict[str, Any]) -> None:
        said = {"token": self._token, "host": socket.gethostname(), "incarnation": incarnation, **what}
        _write(self._folder / f"{name}.json", said)


class _Watched:
    """A file, and for how long its time has not changed. `beats`: it has changed since the first look."""

    def __init__(self, path: Path):
        self.path, self.beats = path, False
        self._time: int | None = None
        self._changed = time.monotonic()

    def read(self) -> dict[str, Any] | None:
        """What it says; None without a file."""
        try:
            with open(self.path, encoding="utf-8") as file:  # opening makes a network file system look anew
                now = os.fstat(file.fileno()).st_mtime_ns
                said = json.load(file)
        except FileNotFoundError:
            return None
        if now != self._time:
            self.beats, self._time, self._changed = self._time is not None, now, time.monotonic()
        return said

    @property
    def silence(self) -> float:
        return time.monotonic() - self._changed


def _write(path: Path, said: dict[str, Any]) -> None:
    """Whole or not at all; readable to its owner only, since it may hold an API key."""
    aside = path.with_suffix(".tmp")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        json.dump(said, file)
    aside.replace(path)
