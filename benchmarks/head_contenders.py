"""Who takes part in benchmarks/head.py: one function each, from hidden states and weight to loss and gradients.

The peers' calls follow their published interfaces of the versions in `PACKAGES`; where such a package is missing, it
is listed as not installed.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from head_cases import Inputs, Output, policy_objective
from torch import Tensor

from dynamo_megatron.kernels import policy_loss, token_stats

PACKAGES = {"liger-kernel": "0.8.5", "verl": "0.9.1"}


class Contender(NamedTuple):
    """`gemms`: products of the whole shape, forward and backward. `target`: see `in_float64`; None: gives no result."""

    name: str
    run: Callable[[Inputs], Output]
    gemms: int
    target: Literal["policy", "clipped", "statistics"] | None = "policy"
    package: str | None = None  # the distribution that it is of
    ours: bool = False

    @property
    def floor(self) -> str:
        """The bare GEMMs it is compared with: three for loss and gradients, one for statistics."""
        return "1 GEMM" if self.gemms == 1 else "3 GEMMs"


def _finish(inputs: Inputs, loss: Tensor, logprobs: Tensor | None = None, entropy: Tensor | None = None) -> Output:
    loss.backward()
    given = (t if t is None else t.detach() for t in (logprobs, entropy))
    return Output(loss.detach(), *given, inputs.hidden.grad, inputs.weight.grad)


@torch.no_grad()
def one_gemm(inputs: Inputs) -> Output:
    inputs.hidden @ inputs.weight.t()
    return Output()


@torch.no_grad()
def one_gemm_float32_out(inputs: Inputs) -> Output:
    torch.mm(inputs.hidden, inputs.weight.t(), out_dtype=torch.float32)
    return Output()


@torch.no_grad()
def three_gemms(inputs: Inputs) -> Output:
    """Forward, dX and dW; the logits stand in for their gradient."""
    logits = inputs.hidden @ inputs.weight.t()
    return Output(hidden_grad=logits @ inputs.weight, weight_grad=logits.t() @ inputs.hidden)


class _VocabParallelEntropy(torch.autograd.Function):
    """Entropy of softmax over a sharded vocabulary, as it is commonly written: whole-logits operations, three
    reductions, the softmax saved."""

    @staticmethod
    def forward(ctx, logits, group):
        maximum = logits.amax(-1, keepdim=True)
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
        softmax = (logits - maximum).exp_()
        total = softmax.sum(-1, keepdim=True)
        dist.all_reduce(total, group=group)
        softmax /= total
        mean = (softmax * logits).sum(-1, keepdim=True)
        dist.all_reduce(mean, group=group)
        ctx.save_for_backward(logits, softmax, mean)
        return (maximum + total.log() - mean)[:, 0]

    @staticmethod
    def backward(ctx, upstream):
        logits, softmax, mean = ctx.saved_tensors
        return upstream[:, None] * softmax * (mean - logits), None


@functools.cache
def one_rank(device: str) -> None:
    """The process group of one rank that the naive Megatron path reduces over."""
    from megatron.core import parallel_state

    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=dist.HashStore(), rank=0, world_size=1, timeout=datetime.timedelta(seconds=300)
    )
    parallel_state.initialize_model_parallel()


def _megatron_statistics(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """float32 logits, Megatron's vocabulary-parallel cross-entropy on a clone (it writes into them), the entropy."""
    one_rank(inputs.hidden.device.type)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    logits = (inputs.hidden @ inputs.weight.t()).float()
    if inputs.case.temperature != 1:
        logits = logits / inputs.case.temperature
    entropy = _VocabParallelEntropy.apply(logits, parallel_state.get_tensor_model_parallel_group())
    labels = inputs.labels.clamp(min=0)
    return -vocab_parallel_cross_entropy(logits.clone()[:, None], labels[:, None])[:, 0], entropy


def naive(inputs: Inputs) -> Output:
    logprobs, entropy = _megatron_statistics(inputs)
    return _finish(inputs, policy_objective(inputs, logprobs, entropy), logprobs, entropy)


@torch.no_grad()
def naive_statistics(inputs: Inputs) -> Output:
    return Output(None, *_megatron_statistics(inputs))


def ours(inputs: Inputs, backend: str, gradient: str, chunk_tokens: int | None = None) -> Output:
    loss, stats, *_ = policy_loss(
        inputs.hidden,
        inputs.main_weight,
        inputs.host_labels,
        inputs.advantages,
        inputs.old_logprobs,
        inputs.weights,
        inputs.case.loss,
        ranges=inputs.ranges,
        temperature=inputs.case.temperature,
        backend=backend,
        gradient=gradient,
        chunk_tokens=chunk_tokens,
    )
    loss.backward()
    return Output(loss.detach(), stats.logprobs, stats.entropy, inputs.hidden.grad, inputs.main_weight.main_grad)


def our_statistics(inputs: Inputs, backend: str) -> Output:
    temperature = inputs.case.temperature
    stats = token_stats(inputs.hidden, inputs.weight, inputs.host_labels, temperature=temperature, backend=backend)
    return Output(None, stats.logprobs, stats.entropy)


def liger_scaled_cross_entropy(inputs: Inputs) -> Output:
    """On Hopper its CuTe kernels, which need nvidia-cutlass-dsl, else chunks of 512 tokens by torch."""
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction

    case = inputs.case
    nll, entropy = LigerFusedLinearScaledCrossEntropyFunction.apply(
        inputs.hidden, inputs.weight, inputs.labels, case.temperature, -100, 1, True
    )
    entropy = entropy.float()
    return _finish(inputs, policy_objective(inputs, -nll, entropy), -nll, entropy)


def verl_fused(inputs: Inputs) -> Output:
    """`use_fused_kernels` with `impl_backend: torch`: chunks of 512 tokens."""
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    labels = inputs.labels.clamp(min=0)
    logprobs, entropy = FusedLinearForPPO()(inputs.hidden, inputs.weight, labels, inputs.case.temperature)
    return _finish(inputs, policy_objective(inputs, logprobs, entropy), logprobs, entropy)


def verl_triton(inputs: Inputs) -> Output:
    """`impl_backend: triton`."""
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    labels, temperature = inputs.labels.clamp(min=0), float(inputs.case.temperature)
    logprobs, entropy = linear_cross_entropy(inputs.hidden, inputs.weight, labels, temperature)
    return _finish(inputs, policy_objective(inputs, logprobs, entropy), logprobs, entropy)


def liger_grpo(inputs: Inputs) -> Output:
    """Every token as a sequence of its own, so that it has an advantage of its own; chunks of 1024 tokens."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(
        beta=0.0,
        use_ref_model=False,
        chunk_size=1024,
        epsilon_low=inputs.case.loss.clip_ratio_low,
        epsilon_high=inputs.case.loss.clip_ratio_high,
        loss_type="bnpo",
        temperature=inputs.case.temperature,
    )
    labels, mask = inputs.labels.clamp(min=0)[:, None], (inputs.labels != -100)[:, None]
    value, _ = loss(
        inputs.hidden[:, None],
        inputs.weight,
        labels,
        mask,
        inputs.advantages,
        old_per_token_logps=inputs.old_logprobs[:, None],
    )
    return _finish(inputs, value)


def contenders(backends: list[str], device: torch.device) -> list[Contender]:
    """`backends`: of our own head."""
    megatron, liger = "megatron-core", "liger-kernel"

    def heads(name: str, run: Callable[..., Output], gemms: int, **how: str) -> list[Contender]:
        target = "statistics" if gemms == 1 else "policy"
        runs = {f"{name}, {backend}": functools.partial(run, backend=backend, **how) for backend in backends}
        return [Contender(of, run, gemms, target, ours=True) for of, run in runs.items()]

    float32_out = [Contender("1 GEMM, float32 out", one_gemm_float32_out, 1, None)] if device.type == "cuda" else []
    return [
        Contender("1 GEMM", one_gemm, 1, None),
        *float32_out,
        Contender("naive statistics", naive_statistics, 1, "statistics", megatron),
        *heads("statistics", our_statistics, 1),
        Contender("3 GEMMs", three_gemms, 3, None),
        Contender("naive", naive, 3, "policy", megatron),
        *heads("eager", ours, 3, gradient="eager"),
        *heads("recompute", ours, 4, gradient="recompute"),
        Contender("liger scaled cross-entropy", liger_scaled_cross_entropy, 4, "policy", liger),
        Contender("verl fused", verl_fused, 4, "policy", "verl"),
        *([Contender("verl fused, Triton", verl_triton, 4, "policy", "verl")] if device.type == "cuda" else []),
        Contender("liger GRPO", liger_grpo, 4, "clipped", liger),
    ]
