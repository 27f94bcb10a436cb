import sys
from pathlib import Path

import pytest

# pytest's importlib mode adds no test folder to the path; plain_head is shared by the files here.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def small_blocks(monkeypatch):
    """Kernel blocks so small that a vocabulary of 37 has full ones and a tail."""
    from dynamo_megatron.kernels import triton_backend

    for name, size in {"STATISTICS_BLOCK": 16, "GRADIENT_BLOCK": 8, "MERGE_BLOCK": 8}.items():
        monkeypatch.setattr(triton_backend, name, size)


@pytest.fixture(params=["torch", pytest.param("triton", marks=pytest.mark.full)])
def backend(request, small_blocks) -> str:
    """triton: in Triton's interpreter, where a case takes seconds; test_triton.py has those of `make test`."""
    return request.param
