"""NVML at its interface alone: a module in the place of pynvml. No test here has a GPU."""

import sys
from types import SimpleNamespace

import pytest

from dynamo_megatron.runtime.gpu_usage import GpuMonitor, GpuRecord, GpuUse


class NVMLError(Exception):
    pass


class Nvml:
    """Four GPUs: GPU i has i GB in use and is busy 10 i % of the time. `fails`: functions that raise."""

    NVMLError = NVMLError

    def __init__(self):
        self.fails = set()

    def __getattr__(self, name):
        functions = {
            "nvmlInit": lambda: None,
            "nvmlDeviceGetHandleByIndex": lambda index: index if index < 4 else self._fail("Invalid Argument"),
            "nvmlDeviceGetHandleByUUID": lambda uuid: int(uuid.removeprefix("GPU-")),
            "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=handle * 10**9),
            "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=10 * handle),
        }
        return (lambda *_: self._fail(name)) if name in self.fails else functions[name]

    def _fail(self, why):
        raise NVMLError(why)


@pytest.fixture
def nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return sys.modules["pynvml"]


@pytest.mark.parametrize(
    ("visible", "gpus", "use"),
    [
        (None, [3], GpuUse(3 * 10**9, 0.3)),
        (None, [1, 2], GpuUse(2 * 10**9, 0.15)),
        ("3,1", [0], GpuUse(3 * 10**9, 0.3)),
        ("GPU-2, GPU-3", [0, 1], GpuUse(3 * 10**9, 0.25)),
        (None, [], None),
    ],
)
def test_gpus_are_those_that_the_process_sees(nvml, monkeypatch, visible, gpus, use):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monitor = GpuMonitor(gpus)
    assert monitor.lacks == "" and monitor.read() == (use and pytest.approx(use))


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUtilizationRates"])
def test_what_nvml_refuses_is_one_line_and_no_reading(nvml, function):
    nvml.fails = {function}
    monitor = GpuMonitor([0])
    assert monitor.lacks == f"no GPU utilisation is measured: NVML: {function}" and monitor.read() is None


@pytest.mark.parametrize("visible", ["", "7", "0"])
def test_a_gpu_that_is_not_there_is_one_line(nvml, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monitor = GpuMonitor([1 if visible == "0" else 0])
    assert monitor.lacks.startswith("no GPU utilisation is measured: NVML: ") and monitor.read() is None


def test_a_gpu_that_is_lost_later_is_not_asked_again(nvml):
    monitor = GpuMonitor([1])
    nvml.fails = {"nvmlDeviceGetMemoryInfo"}
    assert monitor.read() is None
    nvml.fails = set()
    assert monitor.read() is None and "nvmlDeviceGetMemoryInfo" in monitor.lacks


def test_without_the_package_there_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "no pynvml; pip install nvidia-ml-py" in GpuMonitor([0]).lacks
    assert GpuMonitor([]).lacks == ""


def test_the_package_has_what_is_called():
    pynvml = pytest.importorskip("pynvml")
    for name in ("nvmlInit", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetHandleByUUID"):
        assert callable(getattr(pynvml, name))
    fields = {field for each in (pynvml.c_nvmlMemory_t, pynvml.c_nvmlUtilization_t) for field, _ in each._fields_}
    assert {"used", "gpu"} <= fields and issubclass(pynvml.NVMLError, Exception)


def test_records_add_up():
    record = GpuRecord()
    for use in (GpuUse(5, 0.5), GpuUse(3, 1.0)):
        record.add(use)
    record.merge(GpuRecord(2, 9, 0.5))
    assert (record.samples, record.memory, record.utilisation) == (4, 9, 0.5)
