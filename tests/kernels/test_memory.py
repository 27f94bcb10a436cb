import weakref

import plain_head as plain
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dynamo_megatron.config import ModulationConfig, PolicyLossConfig
from dynamo_megatron.kernels import chunked, policy_loss, reference, token_stats, triton_backend

CONFIG = PolicyLossConfig(modulation=ModulationConfig(), kl_coef=0.1, entropy_coef=0.01)
CHUNK, ROWS = 16, 600


class Storages(TorchDispatchMode):
    """Bytes of every storage of at least `smallest` that an operator returns, and the most alive at once."""

    def __init__(self, smallest: int):
        super().__init__()
        self.smallest, self.largest, self.peak = smallest, 0, 0
        self.alive: dict[int, list[int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {id(a) for a in args}
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in known:
                self.seen(tensor)
        return result

    def seen(self, tensor):
        storage = tensor.untyped_storage()
        if storage.nbytes() < self.smallest:
            return
        self.largest = max(self.largest, storage.nbytes())
        entry = self.alive.setdefault(storage.data_ptr(), [0, storage.nbytes()])
        entry[0] += 1
        weakref.finalize(tensor, self.gone, storage.data_ptr())
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.alive.values()))

    def gone(self, pointer):
        self.alive[pointer][0] -= 1
        if self.alive[pointer][0] == 0:
            del self.alive[pointer]


@pytest.mark.parametrize("gradient", ["stats", "eager", "recompute"])
@pytest.mark.parametrize(
    ("backend", "dtype", "buffers"),
    [("torch", torch.float32, 2), ("triton", torch.float32, 1), ("triton", torch.bfloat16, 2)],
)
def test_logits_stay_within_the_workspace(monkeypatch, request, gradient, backend, dtype, buffers):
    if backend == "triton":
        request.getfixturevalue("interpreter")
    buffer = CHUNK * ROWS * 4
    workspace = buffers * buffer
    monkeypatch.setattr(chunked, "WORKSPACE_BYTES", workspace)
    c = plain.case(tokens=50, vocab=599, rows=ROWS, h=4, dtype=dtype)
    hidden, weight = c.hidden.requires_grad_(), c.weight.requires_grad_()
    options = {"vocab_size": c.vocab, "temperature": 0.7, "backend": backend}
    if gradient != "stats":
        ranges = (0.0, 7.0, 1.0) if gradient == "eager" else None
        options |= {"ref_logprobs": c.ref, "ranges": ranges, "gradient": gradient}
    # The weight's gradient is smaller than half a buffer: what is counted is logits and their temporaries.
    with Storages(smallest=buffer // 2) as storages:
        if gradient == "stats":
            token_stats(hidden, weight, c.labels, **options)
        else:
            policy_loss(hidden, weight, c.labels, c.advantages, c.old, c.weights, CONFIG, **options).loss.backward()
    assert storages.largest == buffer  # as large a chunk as the bound allows
    assert storages.peak <= workspace


def test_the_largest_chunk_that_fits_in_whole_gemm_tiles():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert chunked.chunk_size(reference.workspace_buffers(torch.float32, cpu) * 152064 * 4) == 2048
    assert chunked.chunk_size(triton_backend.workspace_buffers(torch.bfloat16, cuda) * 152064 * 4) == 4096
    assert chunked.chunk_size(100 * 1000 * 1000) == 25
    assert chunked.chunk_size(10**10) == 1
