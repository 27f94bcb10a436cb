"""Memory and utilisation of this node's GPUs, from NVML (the package nvidia-ml-py, which is optional).

NVML sees all processes on a GPU. It numbers GPUs by PCI bus, as CUDA does on nodes whose GPUs are of one kind.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from dynamo_megatron.runtime.threads import Call

EVERY = 1.0  # seconds between readings
NOT_MEASURED = "no GPU utilisation is measured"


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
    """Reads the GPUs `gpus`, indices among those that are visible to this process, every EVERY seconds in a thread of
    its own. `lacks`: why it cannot, in one line; "" where it can, or `gpus` is empty."""

    def __init__(self, gpus: Sequence[int]) -> None:
        self.lacks, self._seen = "", GpuUse()
        self._lock, self._closed = threading.Lock(), threading.Event()
        if gpus and importlib.util.find_spec("pynvml") is None:
            self.lacks = f"{NOT_MEASURED}: pip install nvidia-ml-py"
        elif gpus:
            nvml = importlib.import_module("pynvml")
            try:
                nvml.nvmlInit()
                handles = [_handle(nvml, gpu) for gpu in gpus]
                self._read(nvml, handles)  # a MIG partition has no utilisation
                Call(self._watch, nvml, handles)
            except (nvml.NVMLError, ValueError, IndexError) as error:
                self.lacks = f"{NOT_MEASURED}: NVML: {error}"

    def take(self) -> GpuUse:
        """Returns the readings since the last call, each the mean over the GPUs as `busy`."""
        with self._lock:
            seen, self._seen = self._seen, GpuUse()
        return seen

    def close(self) -> None:
        self._closed.set()

    def _watch(self, nvml: Any, handles: list[Any]) -> None:
        """Ends with the first reading that fails, and prints why."""
        try:
            while not self._closed.wait(EVERY):
                self._read(nvml, handles)
        except nvml.NVMLError as error:
            print(f"{NOT_MEASURED} any more: NVML: {error}", flush=True)

    def _read(self, nvml: Any, handles: list[Any]) -> None:
        memory = max(nvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles)
        shares = [nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100 for handle in handles]
        with self._lock:
            self._seen = self._seen.plus(GpuUse(1, memory, sum(shares) / len(shares)))


def _handle(nvml: Any, gpu: int) -> Any:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    name = str(gpu) if visible is None else visible.split(",")[gpu].strip()
    return nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else nvml.nvmlDeviceGetHandleByUUID(name)
