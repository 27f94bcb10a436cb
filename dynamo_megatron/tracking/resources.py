"""What a run uses: memory, cores, GPUs, network, disk. torch's profiler on chosen steps (`tracking.profile_steps`)."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import psutil
import torch
from torch.profiler import ProfilerActivity, profile

from dynamo_megatron.config import Config
from dynamo_megatron.runtime.gpu_usage import GpuMonitor, GpuRecord

if TYPE_CHECKING:
    from dynamo_megatron.policy.layout import Layout


class RankResources:
    """What this rank uses in a step: its process, its GPU and, on the first rank of a node, the node's network.

    `lacks`: why NVML does not say what the GPU does, in one line; "" where it does, or there is no GPU.
    """

    def __init__(self, local_rank: int):
        self._monitor = GpuMonitor([local_rank] if torch.cuda.is_available() else [])
        self.lacks, self._leads, self._gpu = self._monitor.lacks, local_rank == 0, GpuRecord()
        self._network = _network()

    def sample(self) -> None:
        """Reads the GPU. Called by the watchdog thread about once a second, so that no thread is added."""
        if (use := self._monitor.read()) is not None:
            self._gpu.add(use)

    def take(self) -> dict[str, Any]:
        """Plain data for `resource_metrics`, of the time since the last call. Bytes: `host_memory` of this process now,
        `gpu_memory`, the peak of its tensors, and `gpu_used`, the most in use on its GPU, which has the
        `gpu_utilisation`. `network`: interface -> (sent, received), bytes per second."""
        peak = 0
        if torch.cuda.is_available():
            peak = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        found = {"host_memory": psutil.Process().memory_info().rss, "gpu_memory": peak}
        gpu, self._gpu = self._gpu, GpuRecord()
        if gpu.samples:
            found |= {"gpu_used": gpu.memory, "gpu_utilisation": gpu.utilisation}
        if self._leads:
            before, self._network = self._network, _network()
            found["network"] = _rates(before, self._network)
        return found


Network: TypeAlias = "tuple[float, dict[str, tuple[int, int]]]"  # monotonic seconds; bytes sent and received till then


def _network() -> Network:
    counters = psutil.net_io_counters(pernic=True)
    return time.monotonic(), {name: (each.bytes_sent, each.bytes_recv) for name, each in counters.items()}


def _rates(before: Network, now: Network) -> dict[str, tuple[float, float]]:
    """Of the interfaces that moved anything. A container's end (veth) is left out: its bridge has the same bytes."""
    rates, seconds = {}, max(now[0] - before[0], 1e-9)
    for name in now[1].keys() & before[1].keys():
        moved = [(n - b) / seconds for n, b in zip(now[1][name], before[1][name], strict=True)]
        if any(moved) and not name.startswith("veth"):
            rates[name] = (moved[0], moved[1])
    return rates


def resource_metrics(per_rank: Sequence[Mapping[str, Any]], output_dir: Path) -> dict[str, float]:
    """Metrics of a step, computed on rank 0 from every rank's `RankResources.take`.

    All are in bytes except `resources/cpu`, the share of this machine's cores that was busy since the last call, at
    first since this process has imported psutil; `gpu_utilisation`, the mean over the ranks' GPUs, and
    `gpu_utilisation_min`, the least; and `network/INTERFACE/sent` and `received`, bytes per second, of the node that
    moved most.
    """
    metrics: dict[str, float] = {
        "resources/host_memory_max": max(sample["host_memory"] for sample in per_rank),
        "resources/gpu_memory_max": max(sample["gpu_memory"] for sample in per_rank),
        "resources/cpu": psutil.cpu_percent() / 100,
        "resources/disk_free": shutil.disk_usage(output_dir).free,
    }
    if shares := [sample["gpu_utilisation"] for sample in per_rank if "gpu_utilisation" in sample]:
        metrics["resources/gpu_utilisation"] = sum(shares) / len(shares)
        metrics["resources/gpu_utilisation_min"] = min(shares)
        metrics["resources/gpu_used_max"] = max(sample["gpu_used"] for sample in per_rank if "gpu_used" in sample)
    for sample in per_rank:
        for name, rates in sorted(sample.get("network", {}).items()):
            for way, rate in zip(("sent", "received"), rates, strict=True):
                key = f"resources/network/{name}/{way}"
                metrics[key] = max(metrics.get(key, 0.0), rate)
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
