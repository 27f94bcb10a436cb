"""In words, how a gradient or a tensor differs from what is expected."""

from __future__ import annotations

import numpy as np
import torch

from dynamo_megatron.types import RolloutBatch
from dynamo_megatron.verification.model import ReferenceGradient

Tensors = dict[str, torch.Tensor]
NAMED = 3  # rollouts that a line names


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference, relative to the larger norm; 0 for two tensors of zeros."""
    largest = max(float(found.norm()), float(expected.norm()))
    return float((found - expected).norm()) / largest if largest else 0.0


def norm_of(tensors: Tensors) -> float:
    """Of all of them together."""
    return sum(float(t.square().sum()) for t in tensors.values()) ** 0.5


def explain_gradient(
    found: Tensors, expected: ReferenceGradient, rollouts: RolloutBatch, rounding: float, tp: int
) -> str:
    """The simplest explanation: a factor of the whole gradient; factors of some rollouts' parts of it; or the first
    parameter whose gradient differs."""
    whole = {name: g.cpu() for name, g in expected.whole.items()}
    factor = sum(float((g * whole[name]).sum()) for name, g in found.items()) / norm_of(whole) ** 2
    if norm_of({name: g - factor * whole[name] for name, g in found.items()}) < rounding * norm_of(found):
        return f"all of it {factor:.4g} times what is expected: the divisor of the loss, or all of it counted again"
    sampled, trained = expected.sample(found), np.flatnonzero(expected.parts.any(1))
    factors = np.linalg.lstsq(expected.parts[trained].T, sampled, rcond=None)[0]
    left = np.linalg.norm(expected.parts[trained].T @ factors - sampled)
    apart = np.linalg.norm(expected.parts.sum(0) - sampled)
    others = np.flatnonzero(abs(factors - 1) > max(0.05, rounding))
    if left < apart / 5 and len(others):  # not exact, as the modulation depends on the advantage
        missing = others[abs(factors[others]) < 0.05]
        named = missing if len(missing) == len(others) else others
        what = "are missing" if len(missing) == len(others) else "have another weight or advantage"
        each = (rollouts.rollout_ids[trained[i]] for i in named[:NAMED])
        times = ", ".join(f"{name} (x {factors[i]:.3g})" for name, i in zip(each, named, strict=False))
        return f"{len(others)} of {len(trained)} rollouts {what}: {times}{', ...' if len(named) > NAMED else ''}"
    for name, gradient in found.items():
        if relative(gradient, whole[name]) > rounding:
            return explain_tensor(name, gradient, whole[name], rounding, tp)
    return "each parameter's is within rounding, but not their sum"


def explain_tensor(name: str, found: torch.Tensor, expected: torch.Tensor, rounding: float, tp: int) -> str:
    """`tp`: ranks that tensors are cut over."""
    for dim in range(found.dim() if tp > 1 else 0):
        parts = list(found.chunk(tp, dim))
        for i in range(len(parts)):
            for j in range(i):
                swapped = list(parts)
                swapped[i], swapped[j] = swapped[j], swapped[i]
                if relative(torch.cat(swapped, dim), expected) < rounding:
                    return f"{name}: the slices of tensor-parallel ranks {j} and {i} are exchanged"
    factor = float((found * expected).sum() / expected.square().sum()) if expected.any() else np.inf
    if relative(found, factor * expected) < rounding:
        return f"{name}: {factor:.4g} times what is expected"
    return f"{name}: relative error {relative(found, expected):.2g}"
