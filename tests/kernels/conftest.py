import os
import sys
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode

# pytest's importlib mode adds no test folder to the path; plain_head is shared by the files here.
sys.path.insert(0, str(Path(__file__).parent))

DEVICE = torch.device(os.environ.get("KERNEL_TESTS_DEVICE", "cpu"))


class _MadeOnDevice(TorchFunctionMode):
    """Tensors that are made without a device come to `DEVICE`, with the values that they have on the CPU."""

    NAMES = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "tensor", "zeros")
    MAKERS = frozenset(getattr(torch, name) for name in NAMES)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result.to(DEVICE) if func in self.MAKERS and "device" not in (kwargs or {}) else result


@pytest.fixture(autouse=True)
def device():
    """KERNEL_TESTS_DEVICE=cuda runs the same tests with the compiled kernels on a GPU (`make gpu-check`)."""
    if DEVICE.type == "cpu":
        yield DEVICE
        return
    with _MadeOnDevice():
        yield DEVICE


@pytest.fixture
def small_blocks(request, monkeypatch):
    """Kernel blocks so small that a vocabulary of 37 has full ones and a tail."""
    if DEVICE.type == "cpu":
        request.getfixturevalue("interpreter")
    from dynamo_megatron.kernels import triton_backend

    for name, size in {"STATISTICS_BLOCK": 16, "GRADIENT_BLOCK": 8, "MERGE_BLOCK": 8}.items():
        monkeypatch.setattr(triton_backend, name, size)


@pytest.fixture(params=["torch", pytest.param("triton", marks=pytest.mark.full)])
def backend(request) -> str:
    """triton: in Triton's interpreter, where a case takes seconds; test_triton.py has those of `make test`."""
    if request.param == "triton":
        request.getfixturevalue("small_blocks")
    return request.param
