"""How many CPU cores and how much memory this process may use, and whose word OMP_NUM_THREADS is."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

# Of cgroups of both versions: files of the limit and of what is used, and the count of cached pages in memory.stat.
CGROUP1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
CGROUP2 = "memory.max", "memory.current", "inactive_file"
CHOSEN = "DYNAMO_MEGATRON_RANK_THREADS"  # 1: OMP_NUM_THREADS is not the user's, but what a launcher gives a rank


def choose_threads(environment: MutableMapping[str, str], threads: int) -> None:
    """Sets OMP_NUM_THREADS for a rank, where the user has not set it."""
    if not environment.get("OMP_NUM_THREADS"):
        environment |= {"OMP_NUM_THREADS": str(threads), CHOSEN: "1"}


def users_threads() -> int | None:
    """OMP_NUM_THREADS as the user has set it; None where it is unset, or set by a launcher (torchrun sets it to 1)."""
    own = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    by_torchrun = own == "1" and "TORCHELASTIC_RUN_ID" in os.environ
    return int(own) if own.isdecimal() and not os.environ.get(CHOSEN) and not by_torchrun else None


def usable_cores(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """The cores of this process's affinity, or fewer where a control group of version 2 limits it."""
    text = own.read_text(errors="replace") if own.is_file() else ""  # some kernels have none
    groups = [line[3:] for line in text.splitlines() if line.startswith("0::")]
    cores, folder = len(os.sched_getaffinity(0)), root / "".join(groups).strip("/")
    for file in (level / "cpu.max" for level in (folder, *folder.parents)):
        if file.is_file() and not (text := file.read_text()).startswith("max"):
            quota, period = map(int, text.split())
            cores = min(cores, max(1, quota // period))
    return cores


def memory_room(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float:
    """Bytes to this process's memory limit (SLURM's or a container's); infinite without one. Cached pages of files,
    which the kernel frees first, count as free."""
    room = float("inf")
    for line in own.read_text(encoding="utf-8").splitlines() if own.is_file() else ():  # some kernels have none
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        # A container may see its own group as the root: its group's name then leads to no folder there.
        top, (limit, used, cached) = (root / "memory", CGROUP1) if controllers else (root, CGROUP2)
        folder = top / group.strip("/")
        for level in (folder, *folder.parents):
            file = level / limit
            if file.is_file() and (text := file.read_text().strip()) != "max":
                counts = dict(line.split() for line in (level / "memory.stat").read_text().splitlines())
                room = min(room, int(text) - int((level / used).read_text()) + int(counts[cached]))
    return room
