"""What a run uses: memory, cores, GPUs, disk. torch's profiler on chosen steps (`tracking.profile_steps`)."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch.profiler import ProfilerActivity, profile

from dynamo_megatron.config import Config
from dynamo_megatron.runtime.gpu_usage import GpuMonitor

if TYPE_CHECKING:
    from dynamo_megatron.policy.layout import Layout


class RankResources:
    """What this rank uses in a step: its process and its GPU. `lacks`: as of GpuMonitor."""

    def __init__(self, local_rank: int):
        self._monitor = GpuMonitor([local_rank] if torch.cuda.is_available() else [])
        self.lacks = self._monitor.lacks

    def take(self) -> dict[str, Any]:
        """Plain data for `resource_metrics`, of the time since the last call. Bytes: `host_memory` of this process now,
        `gpu_memory`, the peak of its tensors. `gpu`: a GpuUse."""
        peak = 0
        if torch.cuda.is_available():
            peak = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        memory = psutil.Process().memory_info().rss
        return {"host_memory": memory, "gpu_memory": peak, "gpu": self._monitor.take()}


def resource_metrics(per_rank: Sequence[Mapping[str, Any]], output_dir: Path) -> dict[str, float]:
    """Metrics of a step, computed on rank 0 from every rank's `RankResources.take`.

    All are in bytes except `resources/cpu`, the share of this machine's cores that was busy since the last call, at
    first since this process has imported psutil; and `gpu_utilisation`, the mean over the ranks' GPUs, and
    `gpu_utilisation_min`.
    """
    metrics: dict[str, float] = {
        "resources/host_memory_max": max(sample["host_memory"] for sample in per_rank),
        "resources/gpu_memory_max": max(sample["gpu_memory"] for sample in per_rank),
        "resources/cpu": psutil.cpu_percent() / 100,
        "resources/disk_free": shutil.disk_usage(output_dir).free,
    }
    if gpus := [sample["gpu"] for sample in per_rank if sample["gpu"].samples]:
        metrics["resources/gpu_utilisation"] = sum(gpu.utilisation for gpu in gpus) / len(gpus)
        metrics["resources/gpu_utilisation_min"] = min(gpu.utilisation for gpu in gpus)
        metrics["resources/gpu_used_max"] = max(gpu.memory for gpu in gpus)
    return metrics


class StepProfiler:
    """Writes a Chrome trace of each step of `tracking.profile_steps`, output_dir/profile/step-NNNNNN-rank-R.json.gz. A
    trace covers the step from its prompts to its weight sync, without the evaluation and the save that follow. Only the
    ranks of the model's first replica write one: the other replicas do the same work on other rollouts."""

    def __init__(self, config: Config, layout: Layout):
        self._steps, self._folder = frozenset(config.tracking.profile_steps), Path(config.output_dir) / "profile"
        self._layout = layout
        self._running: profile | None = None

    def begin(self, step: int) -> None:
        if step in self._steps and self._layout.dp.rank() == 0:
            gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._running = profile(activities=[ProfilerActivity.CPU, *gpu])
            self._running.start()

    def end(self, step: int) -> None:
        """Writes the step's trace. Raises OSError."""
        if (recorded := self._running) is not None:
            self.close()
            self._folder.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(self._folder / f"step-{step:06d}-rank-{self._layout.rank}.json.gz"))

    def close(self) -> None:
        """Stops a recording without writing it, as after a step that failed."""
        if self._running is not None:
            self._running.stop()
            self._running = None
