"""Two nodes that run the same ranks: who they are, how they meet, and how node 0 has ranks run on both.

Node 0 serves a store at the master's address, as rank 0 of a run does; node 1 reads there what to run next. Both sign
what they write with a secret in a folder that both must see, as the ranks of a run do (docs/security.md). The ranks
get the variables that torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dynamo_megatron.errors import InputError
from dynamo_megatron.rollout.servers.server import listening_address
from dynamo_megatron.runtime.coordination import connect_store
from dynamo_megatron.runtime.free_ports import free_port
from dynamo_megatron.runtime.listening import GLOO_INTERFACE, address_of, interface_of, ranks_address
from dynamo_megatron.runtime.process_signals import die_with_parent
from dynamo_megatron.runtime.signed_store import SignedStore, forget_secret, share_secret

MEETING = 300.0  # seconds in which both nodes must have been started
SEES_FOLDER = 120.0  # seconds until node 1 sees what node 0 has written: NFS may take a minute
NEXT_RUN = 1500.0  # seconds that node 0 may take between two runs: it writes a model, and trains on one rank
GRACE = 30.0  # seconds for ranks to end once a rank on the other node has failed, and for word of their end
POLL_EVERY = 0.2
DEFAULT_PORT = 29500
ADDRESS = "{address}"  # in a run's words: each node's own address, from which it reaches the other


class NodesError(Exception):
    """What keeps the nodes from going on, in one line."""


@dataclass(frozen=True)
class Job:
    """This node's place: `node` 0 serves the store, at `address`:`port`."""

    node: int
    address: str
    port: int
    nodes: int = 2

    @property
    def leads(self) -> bool:
        return self.node == 0


def job_of(nodes: str, environment: Mapping[str, str]) -> Job:
    """The job that NODE_RANK, MASTER_ADDR and MASTER_PORT describe, or, where NODE_RANK is not set, SLURM's
    variables of an srun step. Raises NodesError."""
    if nodes != "2":
        raise NodesError(f"NODES: it is {nodes!r}; two nodes are checked at a time, NODES=2")
    from_slurm = {}
    if not environment.get("NODE_RANK") and "SLURM_JOB_ID" in environment:
        from_slurm = _of_slurm(environment)
    found = {**from_slurm, **{name: value for name, value in environment.items() if value}}
    if found.get("NODE_RANK") not in ("0", "1"):
        given = f"it is {found['NODE_RANK']!r}" if "NODE_RANK" in found else "it is not set"
        raise NodesError(
            f"NODE_RANK: {given}; start the command on both nodes, with NODE_RANK=0 on one, 1 on the other"
        )
    if "MASTER_ADDR" not in found:
        raise NodesError("MASTER_ADDR: it is not set; give node 0's address on both nodes")
    port = found.get("MASTER_PORT", str(DEFAULT_PORT))
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise NodesError(f"MASTER_PORT: {port!r} is no port; give a free one of node 0, the same on both nodes")
    try:
        address_of(found["MASTER_ADDR"])
    except (OSError, UnicodeError) as error:  # UnicodeError: a part of the name is longer than DNS allows
        why = error.strerror if isinstance(error, OSError) else "is no name of a host"
        raise NodesError(f"MASTER_ADDR: {found['MASTER_ADDR']!r}: {why}; give node 0's address") from None
    return Job(int(found["NODE_RANK"]), found["MASTER_ADDR"], int(port))


def _of_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """NODE_RANK, MASTER_ADDR and MASTER_PORT of a task of an srun step, as `launch slurm` derives them. Raises
    NodesError."""
    srun = "srun --nodes=2 --ntasks-per-node=1 make gpu-check NODES=2"
    if "SLURM_STEP_NODELIST" not in environment or "SLURM_PROCID" not in environment:
        raise NodesError(f"SLURM: this job's script or shell is on one node alone; start it on both: {srun}")
    tasks = environment.get("SLURM_STEP_NUM_TASKS"), environment.get("SLURM_STEP_NUM_NODES")
    if tasks != ("2", "2"):
        raise NodesError(f"SLURM: the srun step has {tasks[0]} tasks on {tasks[1]} nodes; start it with {srun}")
    address = environment.get("MASTER_ADDR") or _address_of_first(environment["SLURM_STEP_NODELIST"])
    port = 12000 + int(environment["SLURM_JOB_ID"]) * 8 % 20000
    return {"NODE_RANK": environment["SLURM_PROCID"], "MASTER_ADDR": address, "MASTER_PORT": str(port)}


def _address_of_first(nodes: str) -> str:
    first = _scontrol("show", "hostnames", nodes).split()[:1]
    told = _scontrol("show", "node", *first)
    addresses = [word.partition("=")[2] for word in told.split() if word.startswith("NodeAddr=")]
    if not addresses:
        raise NodesError(f"MASTER_ADDR: scontrol does not tell the address of node {' '.join(first)}; set it")
    return addresses[0]


def _scontrol(*words: str) -> str:
    try:
        done = subprocess.run(["scontrol", *words], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NodesError(f"MASTER_ADDR: scontrol {' '.join(words)}: {error}; set it to node 0's address") from None
    return done.stdout


@contextlib.contextmanager
def _as_rank(job: Job) -> Iterator[None]:
    """In this context this process has the variables of a run with one rank a node."""
    own = {"RANK": job.node, "WORLD_SIZE": job.nodes, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    own |= {"MASTER_ADDR": job.address, "MASTER_PORT": job.port}
    before = {name: os.environ.get(name) for name in own}
    os.environ.update({name: str(value) for name, value in own.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


class Meeting:
    """This node's end of the store. The constructor returns once both nodes are there; `ranks`: of this node.

    `folder`: on both nodes the same, on a file system that both see. `other`: what the other node says of itself.
    """

    def __init__(self, job: Job, ranks: int, folder: Path):
        self.job, self.ranks, self._runs = job, ranks, 0
        self.lost: str | None = None  # on node 0: why node 1 does not answer any more
        with _as_rank(job), self._in_one_line():
            self._store = SignedStore(*self._join(folder))
            self.address = ranks_address() or _own_address()
            self.about = {
                "host": socket.gethostname(),
                "address": self.address,
                "interface": os.environ.get(GLOO_INTERFACE) or interface_of(self.address),
                "ranks": ranks,
            }
        self._set(f"node-{job.node}", json.dumps(self.about))
        self.other = json.loads(self._wait(f"node-{1 - job.node}", f"node {1 - job.node} to see {folder}", SEES_FOLDER))
        if job.leads:
            forget_secret(folder)
        if self.other["ranks"] != ranks:
            self._set(f"read-{job.node}", "")
            if job.leads:  # whose end is the end of the store
                with contextlib.suppress(NodesError):
                    self._wait("read-1", "node 1 to see the mismatch", GRACE)
            both = [self.about, self.other][:: 1 if job.leads else -1]
            told = ", ".join(f"{one['host']} has {one['ranks']} GPUs" for one in both)
            raise NodesError(f"the nodes need the same number of GPUs: {told}; hide some with CUDA_VISIBLE_DEVICES")

    def _join(self, folder: Path) -> tuple[Any, bytes]:
        """(store, secret). Raises NodesError where the other node does not come, or node 1 does not see the folder."""
        job, start = self.job, time.monotonic()
        try:
            store = connect_store(MEETING)
        except ValueError as error:
            raise NodesError(str(error)) from None
        except RuntimeError:
            raise NodesError(
                f"node {job.node} waited {time.monotonic() - start:.0f} s for node 0 at {job.address}:{job.port}: is "
                "gpu-check running there with NODE_RANK=0, and does this node reach that port?"
            ) from None
        store.set(f"here-{job.node}", "")
        while not store.check([f"here-{1 - job.node}"]):
            if time.monotonic() - start > MEETING:
                raise NodesError(
                    f"node {job.node} waited {MEETING:.0f} s for node {1 - job.node} to come to "
                    f"{job.address}:{job.port}: start the command there with NODE_RANK={1 - job.node}"
                )
            time.sleep(POLL_EVERY)
        try:
            return store, share_secret(store, folder, job.node, SEES_FOLDER)
        except TimeoutError:
            raise NodesError(
                f"node {job.node} waited {SEES_FOLDER:.0f} s for what node 0 writes to {folder}: both nodes must see "
                "this folder, as those of a run must see its output_dir; link runs/ to a shared file system"
            ) from None

    # -- node 0 ----------------------------------------------------------------------------------------------------
    def run(self, words: list[str], folder: Path, timeout: float, name: str) -> dict[str, Any]:
        """Has the ranks of both nodes run `python -P WORDS` in `folder`, for at most `timeout` seconds: "exit code" (0,
        or of the first rank to fail; None where it was ended), "said" (the last JSON line of each rank), and "log"
        where the exit code is not 0. The output is in folder/NAME-rank-R.log."""
        self._runs += 1
        order = {"words": words, "folder": str(folder), "name": name, "timeout": timeout, "port": free_port(2)}
        self._set(f"run-{self._runs}", json.dumps(order))
        own = self._run_here(order)
        ended = f"node 1 to end {name}"
        within = timeout + GRACE if own["exit code"] == 0 else 2 * GRACE
        try:
            other = json.loads(self._wait(f"ended-{self._runs}", ended, within))
        except NodesError as error:
            self.lost = str(error)
            other = {"exit code": None, "said": {}, "log": [str(error)], "at": time.time()}
        failed = sorted(
            (one for one in (own, other) if one["exit code"] != 0), key=lambda one: (not one["exit code"], one["at"])
        )
        result = {"exit code": 0, "said": {**own["said"], **other["said"]}}
        if failed:
            result |= {"exit code": failed[0]["exit code"], "log": [line for one in failed for line in one["log"]]}
        return result

    def end(self, code: int) -> None:
        """Tells node 1 that there is no further run, and what to exit with; waits until it knows."""
        if self.lost is not None:
            return
        self._runs += 1
        self._set(f"run-{self._runs}", json.dumps({"exit code": code}))
        with contextlib.suppress(NodesError):  # it is gone
            self._wait(f"ended-{self._runs}", "node 1 to end", GRACE)

    # -- node 1 ----------------------------------------------------------------------------------------------------
    def follow(self) -> int:
        """Runs what node 0 asks for until it has no more; returns node 0's exit code. Raises NodesError."""
        while True:
            self._runs += 1
            order = json.loads(self._wait(f"run-{self._runs}", "node 0 to start its next run", NEXT_RUN))
            if "exit code" in order:
                self._set(f"ended-{self._runs}", "")
                return order["exit code"]
            print(f"node 1: {order['name']}", flush=True)
            self._set(f"ended-{self._runs}", json.dumps(self._run_here(order)))

    # -- both ------------------------------------------------------------------------------------------------------
    def _run_here(self, order: dict[str, Any]) -> dict[str, Any]:
        failed, folder = f"failed-{self._runs}", Path(order["folder"])
        words = [word.replace(ADDRESS, self.address) for word in order["words"]]
        first = self.job.node * self.ranks
        job = {
            "WORLD_SIZE": str(self.job.nodes * self.ranks),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": self.job.address,
            "MASTER_PORT": str(order["port"]),
        }
        deadline = time.monotonic() + SEES_FOLDER
        while not folder.is_dir() and time.monotonic() < deadline:
            time.sleep(POLL_EVERY)
        try:
            return run_ranks(
                words,
                folder,
                order["name"],
                [{**job, "RANK": str(first + i), "LOCAL_RANK": str(i)} for i in range(self.ranks)],
                order["timeout"],
                other_failed=lambda: self._get(failed) is not None,
                tell=lambda: self._set(failed, ""),
            )
        except OSError as error:
            self._set(failed, "")
            return {"exit code": 1, "said": {}, "log": [f"node {self.job.node}: {error}"], "at": time.time()}

    def _set(self, key: str, value: str) -> None:
        with self._in_one_line():
            self._store.set(key, value)

    def _get(self, key: str) -> str | None:
        with self._in_one_line():
            return self._store.get(key)

    def _wait(self, key: str, what: str, timeout: float) -> str:
        deadline = time.monotonic() + timeout
        while (value := self._get(key)) is None:
            if time.monotonic() > deadline:
                raise NodesError(f"node {self.job.node} waited {timeout:.0f} s for {what}")
            time.sleep(POLL_EVERY)
        return value

    @contextlib.contextmanager
    def _in_one_line(self) -> Iterator[None]:
        """Raises NodesError for a store that does not answer, a folder that cannot be written, and a host without an
        address for the other one."""
        try:
            yield
        except RuntimeError:
            where = f"{self.job.address}:{self.job.port}"
            raise NodesError(f"node 0 is gone: its store at {where} does not answer") from None
        except (InputError, OSError) as error:
            raise NodesError(f"node {self.job.node}: {error}") from None


def _own_address() -> str:
    """Without a route to the other node: of the interface that the user named for gloo, or of the host's name."""
    return listening_address(os.environ.get(GLOO_INTERFACE, socket.gethostname()))


def run_ranks(
    words: list[str],
    folder: Path,
    name: str,
    environments: list[dict[str, str]],
    timeout: float,
    other_failed: Callable[[], bool] = lambda: False,
    tell: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Runs `python -P WORDS` in `folder` once for each environment. Where a rank fails, `tell` is called; the others
    have GRACE seconds from then, or from when `other_failed` first says so. Returns as `Meeting.run`, with "at": when
    it ended, seconds since 1970."""
    threads = max(1, (os.cpu_count() or 1) // len(environments))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    started: list[tuple[subprocess.Popen, Path]] = []
    logs = [folder / f"{name}-rank-{own['RANK']}.log" for own in environments]
    for log in logs:
        log.touch()  # before a rank has started: one of them may not be possible
    for own, log in zip(environments, logs, strict=True):
        with open(log, "w", encoding="utf-8") as file:
            process = subprocess.Popen(
                [sys.executable, "-P", *words],
                env={"OMP_NUM_THREADS": str(threads), **inherited, "HF_HUB_OFFLINE": "1", **own},
                cwd=folder,
                stdout=file,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=partial(die_with_parent, signal.SIGKILL, os.getpid()),
            )
        started.append((process, log))
    why = _until_ended([process for process, _ in started], timeout, other_failed, tell)
    codes = [None if process.returncode == -signal.SIGKILL else process.returncode for process, _ in started]
    bad = min((i for i, code in enumerate(codes) if code != 0), key=lambda i: not codes[i], default=None)  # None last
    said = {own["RANK"]: _last_json(log) for own, (_, log) in zip(environments, started, strict=True)}
    result: dict[str, Any] = {"exit code": 0, "said": said, "at": time.time()}
    if bad is not None:
        lines = started[bad][1].read_text(encoding="utf-8", errors="replace").splitlines()[-30:]
        where = f"{name}, rank {environments[bad]['RANK']} on {socket.gethostname()}:"
        result |= {"exit code": codes[bad], "log": [where, *lines, *([why] if why else [])]}
    return result


def _until_ended(
    processes: list[subprocess.Popen], timeout: float, other_failed: Callable[[], bool], tell: Callable[[], None]
) -> str | None:
    """Waits for the ranks; returns why it ended them itself, None where it did not."""
    deadline, why, told = time.monotonic() + timeout, f"ended after {timeout:g} s", False
    try:
        while any(process.poll() is None for process in processes):
            if not told and (here := any(process.poll() for process in processes) or other_failed()):
                told, deadline = here, min(deadline, time.monotonic() + GRACE)
                why = f"ended, {GRACE:g} s after another rank had failed"
                tell()
            if time.monotonic() > deadline:
                tell()
                return why
            time.sleep(POLL_EVERY)
        if any(process.returncode for process in processes) and not told:
            tell()
        return None
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _last_json(log: Path) -> Any:
    """The last line that is a JSON object; None where there is none."""
    for line in reversed(log.read_text(encoding="utf-8", errors="replace").splitlines()):
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                return json.loads(line)
    return None
