"""What a run uses: memory, cores, disk. torch's profiler on chosen steps (`tracking.profile_steps`)."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
from torch.profiler import ProfilerActivity, profile

from dynamo_megatron.config import Config

if TYPE_CHECKING:
    from dynamo_megatron.policy.layout import Layout


def rank_memory() -> tuple[int, int]:
    """Bytes of this rank: its process now, and the peak of its GPU's tensors since the last call (0 without a GPU)."""
    peak = 0
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    return psutil.Process().memory_info().rss, peak


def resource_metrics(per_rank: Sequence[tuple[int, int]], output_dir: Path) -> dict[str, float]:
    """Metrics of a step, computed on rank 0 from every rank's `rank_memory`; in bytes, except `resources/cpu`, the
    share of this machine's cores that was busy since the last call, at first since this process has imported psutil."""
    host, gpu = zip(*per_rank, strict=True)
    return {
        "resources/host_memory_max": max(host),
        "resources/gpu_memory_max": max(gpu),
        "resources/cpu": psutil.cpu_percent() / 100,
        "resources/disk_free": shutil.disk_usage(output_dir).free,
    }


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
