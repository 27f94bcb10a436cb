"""The loss of a micro-batch on the last pipeline stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dynamo_megatron.algorithm.losses import kl_estimate
from dynamo_megatron.algorithm.user_functions import LossInputs, custom_losses
from dynamo_megatron.config import KLConfig
from dynamo_megatron.kernels import PolicyLossOutput, TokenLogprobs
from dynamo_megatron.policy.batch import MicroBatch, to_device
from dynamo_megatron.policy.non_finite import Finite
from dynamo_megatron.runtime.user_code import UserFunction


class HeadLoss(NamedTuple):
    """The loss of one micro-batch."""

    loss: Tensor  # scalar, whose backward pass gives the gradient of the model
    metrics: dict[str, Tensor]  # sums
    finite: Finite


LossOfHidden = Callable[[MicroBatch, Tensor], HeadLoss]  # from a micro-batch and its hidden rows, [r, h]


def fused_loss(slots: Tensor, output: PolicyLossOutput) -> HeadLoss:
    """Converts the output of the kernels' loss."""
    finite = _finite(output.stats.logprobs, output.stats.entropy, output.advantages)
    return HeadLoss(output.loss, output.metrics, Finite(slots, finite, torch.ones_like(finite)))


class StepTokens(NamedTuple):
    """Values of all response tokens of a step, float32 [R] on the CPU; LossInputs describes them."""

    old_logprobs: Tensor
    engine_logprobs: Tensor
    reference_logprobs: Tensor | None
    advantages: Tensor
    weights: Tensor


def custom_loss(
    function: UserFunction, micro_batch: MicroBatch, head: TokenLogprobs, tokens: StepTokens, kl: KLConfig
) -> HeadLoss:
    """sum_t w_t loss_t by the user's function, plus the KL term unless kl.where is `function`. Raises UserCodeError."""
    device = head.logprobs.device
    here = (None if t is None else to_device(t[micro_batch.slots], device) for t in tokens)
    logprobs = head.logprobs.detach().requires_grad_()
    inputs = LossInputs(
        logprobs=logprobs,
        entropy=head.entropy.detach(),
        response=micro_batch.response,
        kl_coef=kl.coef if kl.where == "function" else 0.0,
        **dict(zip(StepTokens._fields, here, strict=True)),
    )
    finite = _finite(*(v for v in vars(inputs).values() if isinstance(v, Tensor)))
    weights, reference = inputs.weights.clone(), inputs.reference_logprobs
    loss = gradient = logprobs.detach()
    if len(loss):
        loss, gradient = custom_losses(function, inputs)
    kept = _finite(loss, gradient) | ~finite
    metrics = {}
    if reference is not None:
        with torch.enable_grad():
            estimate = kl_estimate(logprobs, reference, kl.kind)
            (slope,) = torch.autograd.grad((weights * estimate).sum(), logprobs)
        metrics["kl"] = estimate.detach().sum()
        if kl.where == "loss":
            loss, gradient = loss + kl.coef * estimate.detach(), gradient + kl.coef * slope
    metrics["loss"] = (weights * loss).sum().to(logprobs.dtype)
    # The value is metrics["loss"]; the derivative with respect to head.logprobs is `gradient`.
    total = metrics["loss"] + (gradient * (head.logprobs - logprobs.detach())).sum()
    return HeadLoss(total, metrics, Finite(micro_batch.slots, finite, kept))


def _finite(*values: Tensor) -> Tensor:
    return torch.stack([torch.isfinite(v) for v in values]).all(0)
