"""The norm of the gradient that each data-parallel rank has accumulated by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from dynamo_megatron.policy.layout import Layout
from dynamo_megatron.policy.model import PolicyModel


@torch.no_grad()
def accumulated_square(chunks: Sequence[PolicyModel], layout: Layout) -> float:
    """Squared norm of main_grad over all parameters, summed over the data-parallel ranks; the same on every rank.

    To be called before Megatron finalises the gradients. Reads them once. Not for context parallelism, experts, or a
    tied head in another pipeline stage than its embedding: there no rank has the whole gradient of its sequences.
    """
    total = torch.zeros((), dtype=torch.float64, device=layout.device)
    parts = []  # partial gradients of parameters that every tensor-parallel rank holds whole
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if getattr(parameter, "tensor_model_parallel", False):
                total += _square(parameter.main_grad)
            elif chunk.config.sequence_parallel or "q_layernorm" in name or "k_layernorm" in name:
                parts.append(parameter.main_grad.flatten())
            elif layout.tp.rank() == 0:
                total += _square(parameter.main_grad)
    if parts:
        whole = torch.cat(parts)
        if layout.tp.size() > 1:
            dist.all_reduce(whole, group=layout.tp)
        if layout.tp.rank() == 0:
            total += _square(whole)
    total = total.cpu()
    dist.all_reduce(total, group=layout.host)
    return float(total)


def _square(gradient: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(gradient, dtype=torch.float64) ** 2
