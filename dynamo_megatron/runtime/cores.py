"""How many CPU cores this process may use, and who has said how many threads a process is to have."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import MutableMapping
from pathlib import Path

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
    """The cores of this process's affinity, or fewer where a control group (SLURM's, a container's) limits it."""
    limits = [float(len(os.sched_getaffinity(0)))]
    for line in own.read_text(encoding="ascii").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "cpu" if controllers else root  # of version 1; of version 2
        folder = top / group.strip("/")
        limits += [_quota(level) for level in (folder, *folder.parents) if level.is_relative_to(top)]
    return max(1, math.floor(min(limits)))


def _quota(folder: Path) -> float:
    """Cores, infinite without a limit."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with contextlib.suppress(OSError):
            quota, period = " ".join((folder / name).read_text() for name in names).split()
            return math.inf if quota in ("max", "-1") else int(quota) / int(period)
    return math.inf
