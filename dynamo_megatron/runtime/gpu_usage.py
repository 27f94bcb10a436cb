"""The memory in use and the utilisation of GPUs of this node, from NVML (the package nvidia-ml-py, which is optional).

NVML sees all processes on a GPU. It numbers GPUs by PCI bus, as CUDA does on nodes whose GPUs are of one kind.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class GpuUse(NamedTuple):
    memory: int  # bytes in use on the fullest GPU, by all processes
    utilisation: float  # share of the driver's last sample period (a second or less) with a kernel, mean over the GPUs


@dataclass
class GpuRecord:
    """Of `samples` readings the largest memory and the sum of the utilisations."""

    samples: int = 0
    memory: int = 0
    busy: float = 0.0

    @property
    def utilisation(self) -> float:
        """The mean of one reading or more."""
        return self.busy / self.samples

    def add(self, use: GpuUse) -> None:
        self.merge(GpuRecord(1, *use))

    def merge(self, other: GpuRecord) -> None:
        self.samples += other.samples
        self.memory = max(self.memory, other.memory)
        self.busy += other.busy


class GpuMonitor:
    """Reads the GPUs `gpus`, indices among those that are visible to this process. `lacks`: why there are no readings,
    in one line; "" where there are, or `gpus` is empty."""

    def __init__(self, gpus: Sequence[int]) -> None:
        self.lacks, self._nvml, self._handles = "", None, []
        if not gpus:
            return
        try:
            import pynvml
        except ModuleNotFoundError:
            self.lacks = "no GPU utilisation is measured: this interpreter has no pynvml; pip install nvidia-ml-py"
            return
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            self._handles = [_handle(pynvml, gpu) for gpu in gpus]
        except (pynvml.NVMLError, ValueError, IndexError) as error:
            self.lacks = f"no GPU utilisation is measured: NVML: {error}"
        self.read()  # a MIG partition has no utilisation

    def read(self) -> GpuUse | None:
        """Returns the use now; None where it is not known. Takes less than a millisecond."""
        if self.lacks or not self._handles:
            return None
        try:
            memory = max(self._nvml.nvmlDeviceGetMemoryInfo(handle).used for handle in self._handles)
            shares = [self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100 for handle in self._handles]
        except self._nvml.NVMLError as error:
            self.lacks = f"no GPU utilisation is measured: NVML: {error}"
            return None
        return GpuUse(memory, sum(shares) / len(shares))


def _handle(nvml: Any, gpu: int) -> Any:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    name = str(gpu) if visible is None else visible.split(",")[gpu].strip()
    return nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else nvml.nvmlDeviceGetHandleByUUID(name)
