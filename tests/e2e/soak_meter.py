"""What a soak measures of a run's processes and its machine, and whether that stays flat."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from dynamo_megatron.rollout.guard import shared_memory_of

SHARE = 0.05  # growth from the first to the last quarter of the samples that still counts as flat
LEAST = 24  # samples below which nothing is said of a series
WARM_UP = 32  # steps of a process's life that are not judged: rank 0 grows until then
# A server opens this twice when it is first asked for its load, in the first step of more than two seconds.
SERVERS_LOAD = "/dev/shm/sglang_loads_"
# The share of the machine's CPU time that others than the run may use from one sample to the next, else the step's time
# does not count.
QUIET = 0.25
YOUNG = 5.0  # seconds of a process's life in which it may still have its parent's command line
# Bytes of a process's memory that are no growth either: what a parent shares with a child that it has forked counts
# half until the child ends, and a fault may end it.
FORKED = 8 << 20
COUNTED = ("descriptors", "threads", "sockets", "entries", "folders")  # one more is no growth


@dataclass(frozen=True)
class Usage:
    """Of one process. `memory` (bytes): anonymous and shared pages, each divided by the number of processes that map
    it. `pss` has the pages of files, too, whose share grows where another process with the same libraries ends."""

    memory: int
    pss: int
    descriptors: int
    threads: int
    sockets: int


@dataclass(frozen=True)
class Growth:
    """Medians of the first and the last quarter of `samples` values."""

    what: str
    samples: int
    first: float
    last: float
    flat: bool
    series: Sequence[float] | None = None  # what is not flat


def growth(what: str, values: Sequence[float]) -> Growth:
    """Only growth counts: memory that is given back is no leak. Of what is counted one more is still flat."""
    quarter = max(1, len(values) // 4)
    first, last = statistics.median(values[:quarter]), statistics.median(values[-quarter:])
    least = 1.0 if what.endswith(COUNTED) else FORKED if what.endswith("memory") else 0.0
    allowed = max(SHARE * first, least)
    flat = last - first <= allowed
    return Growth(what, len(values), first, last, flat, None if flat else list(values))


def usage(pid: int) -> Usage | None:
    """None where the process has ended."""
    with contextlib.suppress(OSError, psutil.Error):
        with open(f"/proc/{pid}/smaps_rollup") as file:
            pages = {line.split()[0]: int(line.split()[1]) << 10 for line in file if line.endswith("kB\n")}
        names = [_link(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd")]
        if not pages:
            return None
        counters = min(2, sum(name.startswith(SERVERS_LOAD) for name in names))  # more than two would be a leak
        return Usage(
            memory=pages["Pss_Anon:"] + pages["Pss_Shmem:"],
            pss=pages["Pss:"],
            descriptors=len(names) - counters,
            threads=psutil.Process(pid).num_threads(),
            sockets=sum(name.startswith("socket:") for name in names),
        )
    return None


def _link(path: str) -> str:
    with contextlib.suppress(OSError):  # closed since it was listed
        return os.readlink(path)
    return ""


def kind_of(process: psutil.Process, launcher: int) -> str:
    """The class of a process of a run, by its command line; "" where it is none that lasts."""
    words = process.cmdline()
    line = " ".join(words)
    if process.pid == launcher:
        return "launcher"
    if "dynamo_megatron.rollout.guard" in words:
        return "guard"
    for text, kind in (
        ("sglang::scheduler", "server's scheduler"),
        ("sglang::detokenizer", "server's detokenizer"),
        ("sglang.launch_server", "server's HTTP process"),
        ("dynamo_megatron.reward.worker", "reward worker"),
        ("multiprocessing.spawn", "rollout process"),
    ):
        if text in line and "soak_server.py" not in line:
            return kind
    rank = process.environ().get("RANK")
    return f"rank {rank}" if rank is not None and process.ppid() == launcher else ""


class OtherWork:
    """What else the machine does."""

    def __init__(self) -> None:
        self._at, self._busy, self._used = time.monotonic(), _busy(), dict[psutil.Process, float]()

    def share(self, processes: Sequence[psutil.Process]) -> float:
        """The part of the machine's CPU time since the last call, from 0 to 1, that `processes` have not used."""
        before, self._used = self._used, {}
        for process in processes:
            with contextlib.suppress(psutil.Error):
                self._used[process] = sum(process.cpu_times()[:2])
        used = sum(now - before.get(process, 0.0) for process, now in self._used.items())
        at, busy = time.monotonic(), _busy()
        whole, others = (at - self._at) * psutil.cpu_count(), busy - self._busy - used
        self._at, self._busy = at, busy
        return min(max(others / whole, 0.0), 1.0)


def _busy() -> float:
    times = psutil.cpu_times()
    return times.user + times.system + times.nice + times.irq + times.softirq + times.steal


class Meter:
    """Samples of all processes, by life: one process from its start to its end."""

    def __init__(self, shared_memory: Path, temporary: Path):
        self._shared_memory, self._temporary = shared_memory, temporary
        self._kinds: dict[psutil.Process, str] = {}  # one with the process id of an earlier one is another one
        self._lives: dict[tuple[str, int], list[tuple[int, Usage]]] = defaultdict(list)
        self._whole: dict[str, list[float]] = defaultdict(list)
        self._ignored: set[Path] = set()
        self.beside = 0  # steps whose time does not count, since the machine did other work as well

    def ignore_unused(self, processes: Sequence[psutil.Process]) -> None:
        """Entries of /dev/shm that none of `processes`, all of the run's, maps do not count from here on; where there
        are no processes, temporary folders do not either. For what was killed together with all that would have cleared
        up after it."""
        used = shared_memory_of(process.pid for process in processes)
        unused = {entry for entry in self._shared_memory.iterdir() if str(entry) not in used}
        self._ignored |= {entry for entry in unused if not (processes and entry.is_dir())}
        if not processes:
            self._ignored |= {*self._temporary.iterdir()}

    def sample(
        self, step: int, seconds: float, launcher: int, processes: Sequence[psutil.Process], other_work: float
    ) -> None:
        """After a step that took so long. `processes`: the run's, the launcher too. `other_work`: see OtherWork."""
        for process in processes:
            with contextlib.suppress(psutil.Error):
                if process not in self._kinds:
                    if time.time() - process.create_time() < YOUNG:
                        continue
                    self._kinds[process] = kind_of(process, launcher)
                kind = self._kinds[process]
                if kind and (used := usage(process.pid)) is not None:
                    self._lives[kind, process.pid].append((step, used))
        self._whole["/dev/shm entries"].append(len({*self._shared_memory.iterdir()} - self._ignored))
        self._whole["temporary folders"].append(len({*self._temporary.iterdir()} - self._ignored))
        if other_work <= QUIET:
            self._whole["step time"].append(seconds)
        else:
            self.beside += 1

    def growths(self) -> list[Growth]:
        """Of each process that lived long enough, and of the run as a whole."""
        found = []
        for (kind, pid), samples in sorted(self._lives.items()):
            judged = [used for step, used in samples if step >= samples[0][0] + WARM_UP]
            if len(judged) >= LEAST:
                for name in asdict(judged[0]):
                    if name != "pss":
                        found.append(growth(f"{kind} {pid} {name}", [getattr(used, name) for used in judged]))
        found += [growth(name, values) for name, values in self._whole.items() if len(values) >= LEAST]
        return found

    def largest(self) -> dict[str, dict[str, int]]:
        """The most of each that a process of each class had."""
        most: dict[str, dict[str, int]] = {}
        for (kind, _), samples in sorted(self._lives.items()):
            for _, used in samples:
                for name, value in asdict(used).items():
                    entry = most.setdefault(kind, {})
                    entry[name] = max(entry.get(name, 0), value)
        return most
