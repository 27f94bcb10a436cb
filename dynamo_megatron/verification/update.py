"""An update by Adam with decoupled weight decay (arXiv 1711.05101), tensor by tensor from the states before and after;
and in words, how a gradient differs from what is expected.

The states are float32, and what follows from them is computed in float64. The gradient is recovered from the first
moments: m' = beta1 m + (1 - beta1) g.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch

from dynamo_megatron.config import OptimizerConfig
from dynamo_megatron.types import RolloutBatch
from dynamo_megatron.verification.model import Gradient, Tensors
from dynamo_megatron.verification.record import Saved

HALF_ULP = 2.0**-24  # of float32, relative
MOMENTS = 1e-4  # relative error of second moments, since the gradient is recovered from a difference
NAMED = 3  # rollouts that a line names


class TensorUpdate:
    """Of one tensor. `norm`: of the whole gradient, by which it was clipped; `updates`: the step counter after it;
    `anew`: the moments before it count as 0."""

    def __init__(
        self, before: Saved, after: Saved, name: str, o: OptimizerConfig, norm: float, updates: int, anew: bool
    ):
        kinds, (beta1, beta2), clip = ("exp_avg", "exp_avg_sq", "param"), o.betas, min(1.0, o.clip_grad / (norm + 1e-6))
        (m, m_new), (v, v_new), (old, new) = (
            [saved.of_optimizer(kind, name) for saved in (before, after)] for kind in kinds
        )
        m, v = m * (not anew), v * (not anew)
        clipped = (m_new - beta1 * m) / (1 - beta1)
        self.gradient = clipped / clip  # before clipping
        self.second_moments_hold = relative(v_new, beta2 * v + (1 - beta2) * clipped**2) < MOMENTS
        direction = m_new / (1 - beta1**updates) / ((v_new / (1 - beta2**updates)).sqrt() + o.eps)
        if old.dim() > 1:  # norms and biases do not decay
            direction += o.weight_decay * old
        step = after.groups[0]["lr"] * direction
        bound = 4 * HALF_ULP * old.abs() + 1e-4 * step.abs() + 1e-12
        self.weights_hold = bool(((old - step - new).abs() <= bound).all())
        self.rounded = torch.equal(after.weight(name).double(), new.to(after.dtype).double())


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference, relative to the larger norm; 0 for two tensors of zeros."""
    largest = max(float(found.norm()), float(expected.norm()))
    return float((found - expected).norm()) / largest if largest else 0.0


def explain(found: Tensors, expected: Gradient, name: str, rollouts: RolloutBatch, rounding: float, tp: int) -> str:
    """How `found` differs from `expected`, by other factors of the rollouts' parts if they explain most of it, else by
    the tensor `name`. `tp`: ranks that tensors are cut over."""
    trained, sampled = np.flatnonzero(expected.parts.any(1)), expected.sample(found)
    factors = np.linalg.lstsq(expected.parts[trained].T, sampled, rcond=None)[0]
    left = np.linalg.norm(expected.parts[trained].T @ factors - sampled)
    if left < np.linalg.norm(expected.parts.sum(0) - sampled) / 5:  # not exact: the modulation depends on the advantage
        if np.ptp(factors) < 0.05 * abs(factors.mean()):
            return f"every rollout counts {factors.mean():.4g} times: the divisor of the loss, or a sum made again"
        others = np.flatnonzero(abs(factors - 1) > 0.05)
        lost = not (abs(factors[others]) > 0.05).any()
        shown = [f"{rollouts.rollout_ids[trained[i]]} ({factors[i]:.2g} times)" for i in others[:NAMED]]
        what = "are missing" if lost else "have another weight or advantage"
        return f"{len(others)} of {len(trained)} rollouts {what}, the first {', '.join(shown)}"
    gradient, other = found[name].double(), expected.whole[name].cpu()
    for dim in range(gradient.dim() if tp > 1 else 0):
        parts = gradient.chunk(tp, dim)
        for i, j in itertools.combinations(range(len(parts)), 2):
            order = [{i: j, j: i}.get(k, k) for k in range(len(parts))]
            if relative(torch.cat([parts[k] for k in order], dim), other) < rounding:
                return f"{name}: the slices of tensor-parallel ranks {i} and {j} are exchanged"
    factor = float((gradient * other).sum() / other.square().sum())
    alike = relative(gradient, factor * other) < rounding
    return f"{name}: {f'{factor:.4g} times what is expected' if alike else 'another gradient'}"
