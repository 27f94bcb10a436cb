"""An update by Adam with decoupled weight decay (arXiv 1711.05101), from the states before and after it.

The states are float32, and what follows from them is computed in float64. The gradient is recovered from the first
moments, m' = beta1 m + (1 - beta1) g.
"""

from __future__ import annotations

import torch

from dynamo_megatron.verification.record import Saved

HALF_ULP = 2.0**-24  # of float32, relative


class AdamUpdate:
    """`clipped`: the factor that the gradient was clipped by."""

    def __init__(
        self, before: Saved, after: Saved, betas: tuple[float, float], eps: float, weight_decay: float, clipped: float
    ):
        self._before, self._after, self._betas = before, after, betas
        self._eps, self._decay, self._clipped = eps, weight_decay, clipped

    def _pair(self, kind: str, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        old, new = (saved.of_optimizer(kind, name).double() for saved in (self._before, self._after))
        return old, new

    def gradient(self, name: str) -> torch.Tensor:
        """Before clipping."""
        old, new = self._pair("exp_avg", name)
        return (new - self._betas[0] * old) / (1 - self._betas[0]) / self._clipped

    def gradient_without_past(self, name: str) -> torch.Tensor:
        """As `gradient`, if the first moments before the update had been 0."""
        return self._pair("exp_avg", name)[1] / (1 - self._betas[0]) / self._clipped

    def lost(self, name: str) -> float:
        """The norm of the rounding error of `gradient`."""
        return 4 * HALF_ULP * float(self._pair("exp_avg", name)[0].norm()) / (1 - self._betas[0]) / self._clipped

    def second_moments(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(found, expected from the first moments' gradient)"""
        old, new = self._pair("exp_avg_sq", name)
        gradient = self.gradient(name) * self._clipped
        return new, self._betas[1] * old + (1 - self._betas[1]) * gradient**2

    def _direction(self, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(weights before, weights after, what the learning rate is multiplied by); vectors have no weight decay."""
        old, new = self._pair("param", name)
        updates = self._after.updates
        m, v = (self._after.of_optimizer(kind, name).double() for kind in ("exp_avg", "exp_avg_sq"))
        m, v = m / (1 - self._betas[0] ** updates), v / (1 - self._betas[1] ** updates)
        return old, new, m / (v.sqrt() + self._eps) + (self._decay * old if old.dim() > 1 else 0)

    def learning_rate(self, names: list[str]) -> tuple[float, float]:
        """(that by which the weights moved, by least squares; its rounding error, five standard deviations)"""
        moved = squares = noise = 0.0
        for name in names:
            old, new, direction = self._direction(name)
            moved += float(((old - new) * direction).sum())
            squares += float(direction.square().sum())
            noise += float((HALF_ULP * old * direction).square().sum())
        return (moved / squares, 5 * noise**0.5 / squares) if squares else (0.0, 0.0)

    def moves(self, name: str, learning_rate: float) -> bool:
        """Whether every weight is the old one and the update, but for float32's rounding of both."""
        old, new, direction = self._direction(name)
        error = (new - (old - learning_rate * direction)).abs()
        return bool((error <= 4 * HALF_ULP * old.abs() + 1e-3 * learning_rate * direction.abs() + 1e-12).all())
