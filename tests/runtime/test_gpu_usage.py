"""NVML at its interface alone: a module in the place of pynvml. No test here has a GPU."""

import sys
from types import SimpleNamespace

import pytest

from dynamo_megatron.runtime.gpu_usage import GpuMonitor


class Nvml:
    """Four GPUs: GPU i has i bytes in use and is busy 10 i % of the time. `fails`: functions that raise."""

    class NVMLError(Exception):
        pass

    def __init__(self):
        self.fails = set()

    def __getattr__(self, name):
        functions = {
            "nvmlInit": lambda: None,
            "nvmlDeviceGetHandleByIndex": lambda index: range(4)[index],
            "nvmlDeviceGetHandleByUUID": lambda uuid: int(uuid.removeprefix("GPU-")),
            "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=handle),
            "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=10 * handle),
        }

        def call(*arguments):
            if name in self.fails:
                raise self.NVMLError(name)
            return functions[name](*arguments)

        return call


@pytest.fixture
def nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return sys.modules["pynvml"]


@pytest.mark.parametrize(
    ("visible", "gpus", "use"),
    [
        (None, [1, 2], (1, 2, 0.15)),
        ("3,1", [0], (1, 3, 0.3)),
        ("GPU-2, GPU-3", [0, 1], (1, 3, 0.25)),
        ("", [], (0, 0, 0)),
    ],
)
def test_gpus_are_those_that_the_process_sees(nvml, monkeypatch, visible, gpus, use):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monitor = GpuMonitor(gpus)
    first = monitor.take()
    monitor.close()
    assert monitor.lacks == "" and first == pytest.approx(use)


@pytest.mark.parametrize("why", ["nvmlInit", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUtilizationRates"])
def test_what_nvml_refuses_is_one_line(nvml, why):
    nvml.fails = {why}
    monitor = GpuMonitor([0])
    assert monitor.lacks == f"no GPU utilisation is measured: NVML: {why}" and monitor.take().samples == 0


def test_without_the_package_there_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuMonitor([0]).lacks == "no GPU utilisation is measured: pip install nvidia-ml-py"
    assert GpuMonitor([]).lacks == ""
