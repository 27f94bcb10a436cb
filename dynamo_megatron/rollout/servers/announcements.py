"""Servers of other nodes, announced by files in `output_dir/servers/`, which all nodes see.

The controller (the rollout process of rank 0) writes `run.json`: a token of this run, which incarnations of servers are
to be restarted, and whether servers may be started again now. Each node's `serve` writes `NAME.json` with that token:
the server's Endpoint, or why it is gone. A process that is alive rewrites its files every second, so a failed write
does no harm. A reader compares a file's modification time with the one that it saw before, never with its own clock:
the nodes' clocks need not agree, and files of an older run are never used. It counts looks, not seconds: a disk that
hangs, or a reader that was stopped, is no silence of the writer.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import secrets
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from dynamo_megatron.rollout.servers.server_api import Endpoint
from dynamo_megatron.rollout.servers.supervisor import Listener, Supervisor
from dynamo_megatron.runtime.whole_files import replacing

BEAT_EVERY = 1.0  # seconds
SILENCE = 20  # looks without a beat until a node counts as gone; it may come back
# Looks without a beat until a node gives up the run, for good. A run that ends removes RUN, the next run writes another
# token, and rank 0 stops a rollout process that hangs for two minutes (`worker.SILENCE`). So only a run whose host is
# gone is silent this long, and waiting for it costs nothing but idle GPUs.
RUN_SILENCE = 600
RUN = "run.json"


def servers_folder(output_dir: str | os.PathLike) -> Path:
    return Path(output_dir) / "servers"


class Announced:
    """The controller's side: notifies `listener` of the servers `names` as their nodes announce them."""

    def __init__(self, output_dir: str | os.PathLike, names: Collection[str], listener: Listener):
        self._folder, self._names, self._listener = servers_folder(output_dir), names, listener
        self._token = secrets.token_hex(16)
        self._restarts: dict[str, tuple[int, str]] = {}
        self._starts = True

    def restart(self, name: str, incarnation: int, why: str) -> None:
        """Has this incarnation of the server, or an earlier one, restarted by its node."""
        self._restarts[name] = incarnation, why

    def allow_starts(self, allowed: bool) -> None:
        """See Supervisor.allow_starts."""
        self._starts = allowed

    async def run(self) -> None:
        """Runs until it is cancelled; then the nodes stop their servers."""
        self._folder.mkdir(parents=True, exist_ok=True)
        files = {name: _Watched(self._folder / f"{name}.json") for name in self._names}
        writing: asyncio.Future | None = None
        heard: dict[str, tuple[int, bool]] = {}  # what the listener knows: name -> incarnation, whether it is up
        try:
            while True:
                said = {"token": self._token, "restarts": dict(self._restarts), "starts": self._starts}
                writing = asyncio.ensure_future(asyncio.to_thread(_write, self._folder / RUN, said))
                await asyncio.shield(writing)  # not in this thread: a disk may hang
                for name, file in files.items():
                    said = await asyncio.to_thread(file.read)
                    if said is None and heard.get(name, (0, False))[1]:
                        heard[name] = heard[name][0], False
                        self._restarts.pop(name, None)
                        self._listener.down(name, f"its node has ended ({file.path} is gone)", False)
                    if said is None or said["token"] != self._token:
                        continue
                    now = said["incarnation"], "endpoint" in said and file.missed < SILENCE
                    if now == heard.get(name):
                        continue
                    heard[name] = now
                    if self._restarts.get(name, (0, ""))[0] != now[0]:
                        self._restarts.pop(name, None)  # it has been restarted
                    if now[1]:
                        self._listener.up(Endpoint(**said["endpoint"]))
                    else:
                        silent = f"its node has given no sign of life for {SILENCE * BEAT_EVERY:g} s ({file.path})"
                        self._listener.down(name, said.get("why", silent), said.get("final", False))
                await asyncio.sleep(BEAT_EVERY)
        finally:
            if writing is not None:  # it would write the file again
                await asyncio.wait([writing], timeout=SILENCE * BEAT_EVERY)
            for path in (self._folder / RUN, *(f.path for f in files.values())):
                _remove(path)


def end_run(output_dir: str | os.PathLike) -> None:
    """Stops the nodes of a run whose controller was killed and could not notify them."""
    _remove(servers_folder(output_dir) / RUN)


class NodeSide:
    """A node's side: writes what the node's Supervisor reports to files. Call `join` first."""

    def __init__(self, output_dir: str | os.PathLike, names: Collection[str]):
        self._folder = servers_folder(output_dir)
        self._run = _Watched(self._folder / RUN)
        self._token = ""
        self._incarnations = dict.fromkeys(names, 0)
        self._said: dict[str, dict[str, Any]] = {}

    def up(self, endpoint: Endpoint) -> None:
        self._incarnations[endpoint.name] = endpoint.incarnation
        self._say(endpoint.name, endpoint.incarnation, {"endpoint": dataclasses.asdict(endpoint)})

    def down(self, name: str, why: str, final: bool) -> None:
        self._incarnations[name] += 1  # a start that failed was an incarnation that nobody saw
        self._say(name, self._incarnations[name], {"why": why, "final": final})

    async def join(self, timeout: float) -> None:
        """Waits until a run gives signs of life, for at most `timeout` seconds. Raises TimeoutError."""
        deadline = time.monotonic() + timeout
        while (said := self._run.read()) is None or not self._run.beats:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no run has shown itself in {self._folder} within {timeout:g} s")
            await asyncio.sleep(BEAT_EVERY)
        self._token = said["token"]

    async def run(self, supervisor: Supervisor) -> None:
        """Rewrites this node's files every second and passes on to `supervisor` what the controller says of servers.
        Returns when the run has ended."""
        while True:
            said = self._run.read()
            if said is None or said["token"] != self._token or self._run.missed > RUN_SILENCE:
                return
            supervisor.allow_starts(said["starts"])
            for name, (incarnation, why) in said["restarts"].items():
                if incarnation <= self._incarnations.get(name, 0):  # not of an earlier process of this node
                    supervisor.restart(name, incarnation, why)
            for name, what in self._said.items():
                _write(self._folder / f"{name}.json", what)
            await asyncio.sleep(BEAT_EVERY)

    def leave(self) -> None:
        """Removes the files that this process has written: others may be of another start of the run."""
        for name in self._said:
            _remove(self._folder / f"{name}.json")

    def _say(self, name: str, incarnation: int, what: dict[str, Any]) -> None:
        self._said[name] = {"token": self._token, "incarnation": incarnation, **what}


class _Watched:
    """A file that its writer rewrites every BEAT_EVERY seconds. `missed`: how many looks in a row found it unchanged;
    `beats`: whether it has changed since the first look."""

    def __init__(self, path: Path):
        self.path, self.missed, self.beats = path, 0, False
        self._time: int | None = None
        self._said: dict[str, Any] | None = None

    def read(self) -> dict[str, Any] | None:
        """Returns the file's content; where it cannot be read now, the last content read. None without a file."""
        self.missed += 1
        try:
            with open(self.path, encoding="utf-8") as file:  # opening makes a network file system look anew
                now = os.fstat(file.fileno()).st_mtime_ns
                self._said = json.load(file)
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            return self._said
        if now != self._time:
            self.missed, self.beats, self._time = 0, self._time is not None, now
        return self._said


def _write(path: Path, said: dict[str, Any]) -> None:
    """Writes the whole file, or nothing if the disk fails. Only its owner can read the file: it may hold an API key."""
    try:
        with replacing(path, mode=0o600) as file:
            file.write(json.dumps(said).encode())
    except OSError as error:
        print(f"{path}: cannot be written now: {error.strerror}", flush=True)  # to the log of the process


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
