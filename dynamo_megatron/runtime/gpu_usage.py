"""Memory and utilisation of this node's GPUs, from NVML (the package nvidia-ml-py, which is optional).

NVML sees all processes on a GPU. It numbers GPUs by PCI bus, as CUDA does on nodes whose GPUs are of one kind.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple


class GpuUse(NamedTuple):
    """Of `samples` readings."""

    samples: int = 0
    memory: int = 0  # bytes in use on the fullest GPU, at most
    busy: float = 0.0  # sum of the shares of time with a kernel running, each of the second or less before a reading

    @property
    def utilisation(self) -> float:
        """Mean share of time with a kernel running; there must be a reading."""
        return self.busy / self.samples

    def plus(self, other: GpuUse) -> GpuUse:
        return GpuUse(self.samples + other.samples, max(self.memory, other.memory), self.busy + other.busy)


class GpuMonitor:
    """Reads the GPUs `gpus`, indices among those that are visible to this process. `lacks`: why it cannot, in one line;
    "" where it can, or `gpus` is empty."""

    def __init__(self, gpus: Sequence[int]) -> None:
        self.lacks, self._nvml, self._handles = "", None, []
        if not gpus:
            return
        try:
            import pynvml
        except ModuleNotFoundError:
            self.lacks = "no GPU utilisation is measured: pip install nvidia-ml-py"
            return
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            self._handles = [_handle(pynvml, gpu) for gpu in gpus]
        except (pynvml.NVMLError, ValueError, IndexError) as error:
            self.lacks = f"no GPU utilisation is measured: NVML: {error}"
        self.read()  # a MIG partition has no utilisation

    def read(self) -> GpuUse:
        """Returns one reading, the mean over the GPUs as `busy`; none where NVML fails, now or before."""
        if self.lacks or not self._handles:
            return GpuUse()
        try:
            memory = max(self._nvml.nvmlDeviceGetMemoryInfo(handle).used for handle in self._handles)
            shares = [self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100 for handle in self._handles]
        except self._nvml.NVMLError as error:
            self.lacks = f"no GPU utilisation is measured: NVML: {error}"
            return GpuUse()
        return GpuUse(1, memory, sum(shares) / len(shares))


def _handle(nvml: Any, gpu: int) -> Any:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    name = str(gpu) if visible is None else visible.split(",")[gpu].strip()
    return nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else nvml.nvmlDeviceGetHandleByUUID(name)
