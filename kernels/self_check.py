"""Checks before training that the Triton kernels and PyTorch agree on this machine."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from dynamo_megatron.algorithm.modulation import ModulationRanges
from dynamo_megatron.config import PolicyLossConfig
from dynamo_megatron.errors import InputError
from dynamo_megatron.kernels import layers, reference
from dynamo_megatron.kernels.chunked import find_backend
from dynamo_megatron.kernels.head import policy_loss

TOKENS = 12
ROWS = 10_000  # of the weight's shard: more than two blocks of every kernel, and little memory
LIMIT, BFLOAT16_GRADIENT_LIMIT = 1e-4, 2e-2  # of the norm; a rounding to bfloat16 is 2^-9 of a value


def check_backend(
    weight: Tensor,
    config: PolicyLossConfig,
    *,
    gradient: str,
    kl_cov: bool,
    response_ratio: bool,
    backend: str,
    temperature: float,
    tp_group: dist.ProcessGroup | None,
) -> None:
    """Compares loss, statistics and gradients of a few random tokens where `backend` resolves to Triton.

    gradient: as training passes it to `policy_loss`; kl_cov, response_ratio: whether training passes old_kl_coef or
    log_ratios. weight: [V/tp, h], this rank's shard; its first rows are used. Every rank of tp_group takes part and
    comes to the same result. Raises ValueError where something differs by more than rounding.
    """
    if find_backend(backend, weight.device) is reference:
        return
    generator = torch.Generator().manual_seed(0)
    rows = min(ROWS, weight.shape[0])
    size = 1 if tp_group is None else dist.get_world_size(tp_group)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(weight.device)

    hidden = random(TOKENS, weight.shape[1]).to(weight.dtype)
    vocab_size = rows * size - 3  # the last columns as padding
    labels = torch.randint(0, vocab_size, (TOKENS,), generator=generator).to(weight.device)
    advantages, drift = random(TOKENS), 0.3 * random(TOKENS)
    weights = torch.full((TOKENS,), 1 / TOKENS, device=weight.device)
    tokens = (advantages, drift - 9.0, weights)
    modulation = config.modulation and replace(config.modulation, expectation="exact")
    config = replace(config, modulation=modulation, entropy_coef=config.entropy_coef or 0.01)
    results = []
    for name in ("torch", "triton"):
        x, w = hidden.clone().requires_grad_(), weight.detach()[:rows].clone().requires_grad_()
        with torch.enable_grad():
            out = policy_loss(
                x,
                w,
                labels,
                *tokens,
                config,
                ref_logprobs=drift - 9.0,
                old_kl_coef=weights if kl_cov else None,
                log_ratios=drift if response_ratio else None,
                ranges=ModulationRanges(0.0, 12.0, 0.1),
                temperature=temperature,
                vocab_size=vocab_size,
                tp_group=tp_group,
                backend=name,
                gradient=gradient,
            )
            out.loss.backward()
        values = {"loss": out.loss.detach(), **out.stats._asdict(), "advantages": out.advantages}
        results.append({**values, "hidden.grad": x.grad, "weight.grad": w.grad})
    for name, want in results[0].items():
        limit = BFLOAT16_GRADIENT_LIMIT if want.dtype == torch.bfloat16 else LIMIT
        worst = (results[1][name].float() - want.float()).norm() / want.float().norm().clamp(min=1e-3)
        if tp_group is not None:
            dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=tp_group)
        if not worst.item() <= limit:
            raise InputError(
                f"kernels.backend: on this machine Triton and the reference differ by {worst.item():.2g} of {name} "
                f"(limit {limit:g}); set kernels.backend=torch and report it"
            )


def check_layers(device: torch.device, dtype: torch.dtype) -> None:
    """Compares RoPE and SwiGLU of a few random tokens in `dtype`, as Triton kernels, with torch's in float32. Raises
    ValueError where they differ by more than rounding."""
    from dynamo_megatron.kernels import layer_kernels

    generator = torch.Generator().manual_seed(0)
    made = {"generator": generator, "device": "cpu"}  # where `layers` has no kernels
    x, y, gradient = (torch.randn(TOKENS, *shape, **made) for shape in ((3, 16), (80,), (40,)))
    weights = torch.rand(TOKENS, 1, **made)
    table = layers.rotary_table(torch.arange(TOKENS, device="cpu"), torch.rand(8, **made))
    x, y, gradient = (t.to(dtype).float() for t in (x, y, gradient))
    here = [t.to(device, dtype) for t in (x, y, gradient)]
    found = [layer_kernels.rotated(here[0], table.to(device), 1.0, interleaved) for interleaved in (False, True)]
    found.append(layer_kernels.swiglu(here[1], None))
    found += layer_kernels.swiglu_gradient(here[2], here[1], weights.to(device))
    wanted = [layers.rotate(x, table), layers.rotate(x, table, True), layers.swiglu(y)]
    wanted += layers.swiglu_gradient(gradient, y, weights)
    limit = LIMIT if dtype == torch.float32 else BFLOAT16_GRADIENT_LIMIT
    names = ("RoPE", "interleaved RoPE", "SwiGLU", "SwiGLU's gradient", "its weights'")
    for name, got, want in zip(names, found, wanted, strict=True):
        if not (got.float().cpu() - want).norm() <= limit * want.norm():
            raise InputError(
                f"the Triton kernel of {name} and PyTorch differ on this machine: report it with its versions"
            )
