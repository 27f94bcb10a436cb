"""The memory, CPU cores and disk that a run uses."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import torch


def rank_memory() -> dict[str, int]:
    """Bytes: `host_memory` of this process now, and `gpu_memory`, the peak of its tensors since the last call."""
    peak = 0
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    return {"host_memory": psutil.Process().memory_info().rss, "gpu_memory": peak}


def resource_metrics(per_rank: Sequence[Mapping[str, int]], output_dir: Path) -> dict[str, float]:
    """Metrics of a step, computed on rank 0 from every rank's `rank_memory`.

    All are in bytes except `resources/cpu`: the share of this machine's cores that was busy since the last call, at
    first since this process has imported psutil.
    """
    return {
        "resources/host_memory_max": max(sample["host_memory"] for sample in per_rank),
        "resources/gpu_memory_max": max(sample["gpu_memory"] for sample in per_rank),
        "resources/cpu": psutil.cpu_percent() / 100,
        "resources/disk_free": shutil.disk_usage(output_dir).free,
    }
