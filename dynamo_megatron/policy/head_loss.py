"""The loss of a micro-batch on the last pipeline stage, and the error if the loss or the gradient is not finite."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from dynamo_megatron.algorithm.losses import kl_estimate
from dynamo_megatron.algorithm.user_functions import LossInputs, custom_losses
from dynamo_megatron.config import KLConfig
from dynamo_megatron.kernels import PolicyLossOutput, TokenLogprobs
from dynamo_megatron.policy.batch import MicroBatch, MiniBatch
from dynamo_megatron.policy.layout import Layout
from dynamo_megatron.policy.non_finite import NonFiniteError
from dynamo_megatron.policy.pass_inputs import PassInputs
from dynamo_megatron.policy.transfer import to_device
from dynamo_megatron.runtime.user_code import UserFunction


class Finite(NamedTuple):
    """Flags of the n tokens of a micro-batch that are trained on. They stay on their device until they are needed."""

    slots: Tensor  # int64 [n], on the CPU
    inputs: Tensor  # bool [n]: the inputs of the loss are finite
    function: Tensor  # bool [n]: the user's function's losses and derivatives are finite, or `inputs` is False


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


def raise_non_finite(
    result: Mapping[str, float],
    found: Sequence[Finite],
    parameters: Sequence[Tensor],
    inputs: PassInputs,
    mini_batch: MiniBatch,
    layout: Layout,
    function: UserFunction | None,
    broken: Sequence[str],
) -> NoReturn:
    """Raises NonFiniteError on all ranks. `result`: loss and gradient norm of the update. `found`: the flags of this
    rank's micro-batches. `broken`: from `broken_weights`."""
    source = inputs.sequences

    def prompts(slots: np.ndarray) -> set[str]:
        owners = np.searchsorted(source.response_offsets, slots, side="right") - 1
        return {source.prompt_ids[s] for s in owners}

    bad_inputs: set[str] = set()
    by_function: set[str] = set()
    for finite in found:
        slots = finite.slots.numpy()
        by_function |= prompts(slots[~finite.function.cpu().numpy()])
        bad_inputs |= prompts(slots[~finite.inputs.cpu().numpy()])
    gradients_finite = all(torch.isfinite(p.main_grad).all() for p in parameters)
    trained = {source.prompt_ids[s] for m in mini_batch.micro_batches for s in m.sequences}
    mine = (layout.rank, gradients_finite and not bad_inputs, sorted(bad_inputs), sorted(trained), sorted(by_function))
    everyone = layout.gather(mine)
    what = f"loss {result['loss']:g}, gradient norm {result['grad_norm']:g} before the optimizer step"
    causes = [*inputs.faults(), *broken]
    if at_fault := [x for x in everyone if x[4]]:
        assert function is not None
        where = "; ".join(f"rank {rank}, prompts {', '.join(bad)}" for rank, *_, bad in at_fault)
        what = f"{function.name} gave a loss or derivative that is NaN or infinite: {what}"
    else:
        at_fault = [x for x in everyone if x[2]] or [x for x in everyone if not x[1]] or everyone
        where = "; ".join(f"rank {rank}, prompts {', '.join(bad or prompts)}" for rank, _, bad, prompts, _ in at_fault)
    raise NonFiniteError("; ".join([f"{what}: {where}", *causes]), inputs)
