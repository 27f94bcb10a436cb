"""How often a training step lets the host wait for the GPU: a budget by layer, micro-batch and update. No tensor of the
host meets one of the GPU, in a push's gathering and in an offload neither."""

import contextlib

import pytest
import torch
from sync_lint import HostWaits
from torch.overrides import TorchFunctionMode

METHODS = {
    "dynamo": {"algorithm": {"modulation": {"tau": 0.5}}},
    "sequence ratios": {"algorithm": {"modulation": None, "loss": {"ratio": "sequence_mean"}}},
    "KL and entropy": {"algorithm": {"modulation": None, "kl": {"coef": 0.1}, "loss": {"entropy_coef": 0.01}}},
    "published scope": {
        "algorithm": {"modulation": {"scope": "micro_batch", "expectation": "sequence_mean"}},
        "kernels": {"gradient": "recompute"},
    },
}
PER_MICRO_BATCH = 4  # outside the layers; the head looks for labels that are left out, and for wrong ones
PER_UPDATE = 2  # the gradient norm, which brings the metrics; Megatron's own for clipping


@pytest.mark.parametrize(
    ("method", "engine"),
    [
        ("dynamo", True),
        ("dynamo", False),
        *(pytest.param(name, True, marks=pytest.mark.full) for name in METHODS if name != "dynamo"),
    ],
)
def test_the_budget_of_a_step(gpu_branch, method, engine):
    """`engine`: TransformerEngine's layers, else Megatron's with torch's attention."""
    of_method = METHODS[method]
    kernels = {"backend": "torch"} | of_method.get("kernels", {})  # the reference of the kernels that a GPU would take
    found = gpu_branch(changes=of_method | {"kernels": kernels}, lint=True, transformer_engine=engine)
    outside = found["outside"]
    assert found["layers"] == {}
    assert outside["pack"] == 0 and outside["statistics"] <= 1, found["found"]
    assert outside["micro-batches"] <= PER_MICRO_BATCH * found["micro-batches"], found["found"]
    waits = {key: n for key, n in found["found"].items() if key.startswith("update") and "_local_scalar" in key}
    assert sum(waits.values()) <= PER_UPDATE, found["found"]
    assert found["mixed"] == {} and found["dtypes"] == {} and found["pushed"] > 0 and found["offloaded"] > 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("seed", "kind"),
    [
        ("wrong device", "mixed"),
        ("missing to", "mixed"),
        ("missing to in a loss", "mixed"),
        ("float32 times bfloat16", "dtypes"),
    ],
)
def test_a_fault_in_a_step_is_found(gpu_branch, seed, kind):
    """`seed`: what gpu_branch_job.py breaks in the policy."""
    kernels = {"kernels": {"backend": "torch"}}
    found = gpu_branch(changes=METHODS["dynamo"] | kernels, lint=True, transformer_engine=False, seed=seed)
    print(seed, found[kind], found["raised"])
    assert found[kind]
    if kind == "dtypes":
        assert "dtype" in found["raised"]


class NoGpu(TorchFunctionMode):
    """Moves to a GPU are none."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.to and str(args[1]) == "cuda":
            return args[0]
        return func(*args, **(kwargs or {}))


def on_gpu(values: torch.Tensor) -> torch.Tensor:
    return values.to("cuda", non_blocking=True)


WAITS = {
    "item": lambda x: (x * 2).sum().item(),
    "float": lambda x: float(x[0] + 1),
    "if": lambda x: bool((x > 0).all()),
    "tolist": lambda x: x.view(2, 2).tolist(),
    "cpu": lambda x: x.exp().cpu(),
    "nonzero": lambda x: (x > 0).nonzero(),
    "mask": lambda x: x[x > 0],
    "equal": lambda x: torch.equal(x, x + 1),
    "unique": lambda x: x.unique(),
    "repeat": lambda x: x.repeat_interleave(x.long()),
    "from the host": lambda x: x + torch.ones(4).to("cuda"),
    "in backward": lambda x: _Squared.apply(x.requires_grad_()).sum().backward(),
}
NO_WAITS = {
    "arithmetic": lambda x: (x * 2).sum(),
    "index": lambda x: x[on_gpu(torch.tensor([0, 1]))],
    "of the host": lambda x: torch.ones(4).sum().item(),
    "was on the GPU": lambda x: x.to("cpu", non_blocking=True).sum().item(),
    "repeat": lambda x: x.repeat_interleave(x.long(), output_size=10),
}


MIXES = {
    "add": lambda x: x + torch.ones(4),
    "in place": lambda x: x.add_(torch.ones(4)),
    "of the host in place": lambda x: torch.ones(4).add_(x),
    "product": lambda x: x.view(2, 2) @ torch.ones(2, 2),
    "one value in a product": lambda x: torch.dot(x[:1], torch.ones(1)),
    "filled": lambda x: x.masked_fill(torch.ones(4, dtype=torch.bool), 0.0),
    "list": lambda x: torch.cat([x, torch.ones(4)]),
    "choice": lambda x: torch.where(torch.ones(4, dtype=torch.bool), x, x),
    "rows": lambda x: x.index_select(0, torch.tensor([0, 1])),
    "gather": lambda x: x.gather(0, torch.tensor([0, 1])),
    "indexed by the GPU": lambda x: torch.ones(4)[on_gpu(torch.tensor([0, 1]))],
    "put from the host": lambda x: x.index_put_((on_gpu(torch.tensor([0, 1])),), torch.ones(2)),
    "in backward": lambda x: _HostGradient.apply(x.requires_grad_()).sum().backward(),
}
NO_MIXES = {
    "one value": lambda x: x * torch.tensor(2.0),
    "one value in place": lambda x: x.mul_(torch.tensor(2.0)),
    "filled": lambda x: x.fill_(torch.tensor(2.0)),
    "copy": lambda x: x.copy_(torch.ones(4)),
    "copy to the host": lambda x: torch.ones(4).copy_(x),
    "moved": lambda x: x.cpu() + torch.ones(4),
    "host's index": lambda x: x[torch.tensor([0, 1])],
    "of the GPU": lambda x: x @ on_gpu(torch.ones(4)),
}


class _HostGradient(torch.autograd.Function):
    """Multiplies its gradient by a vector that has stayed on the host."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, upstream):
        return upstream * torch.full((4,), 2.0)


class _Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, upstream):
        (x,) = ctx.saved_tensors
        return upstream * 2 * x * float(x.sum())


GEMMS_REFUSED = {
    "whole numbers": lambda x: x.long().view(2, 2) @ x.long().view(2, 2),
    "float32 and bfloat16": lambda x: x.view(2, 2) @ x.view(2, 2).bfloat16(),
    "a linear layer's input": lambda x: torch.nn.functional.linear(x.view(2, 2).bfloat16(), x.view(2, 2)),
}


@pytest.mark.parametrize("name", GEMMS_REFUSED)
def test_a_product_that_cuda_refuses_is_seen(name):
    waits = HostWaits()
    refused = contextlib.nullcontext() if name == "whole numbers" else pytest.raises(RuntimeError, match="dtype")
    with NoGpu(), waits.watching(), refused:
        GEMMS_REFUSED[name](on_gpu(torch.arange(1.0, 5.0)))
    assert sum(waits.dtypes.values()) == 1, waits.dtypes


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_is_seen(name):
    waits = HostWaits()
    with NoGpu(), waits.watching():
        WAITS[name](on_gpu(torch.arange(1.0, 5.0)))
    assert waits.outside("") == 1, waits.found


@pytest.mark.parametrize("name", NO_WAITS)
def test_what_is_none_is_not(name):
    waits = HostWaits()
    with NoGpu(), waits.watching():
        NO_WAITS[name](on_gpu(torch.arange(1.0, 5.0)))
    assert not waits.found


@pytest.mark.parametrize("name", MIXES)
def test_a_mix_is_seen(name):
    waits = HostWaits()
    with NoGpu(), waits.watching():
        MIXES[name](on_gpu(torch.arange(1.0, 5.0)))
    assert sum(waits.mixed.values()) == 1, waits.mixed


@pytest.mark.parametrize("name", NO_MIXES)
def test_what_cuda_takes_is_no_mix(name):
    waits = HostWaits()
    with NoGpu(), waits.watching():
        NO_MIXES[name](on_gpu(torch.arange(1.0, 5.0)))
    assert not waits.mixed
