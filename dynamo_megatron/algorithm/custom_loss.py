"""Token losses from a user's function, `algorithm.loss.kind: module:function`. `testing.py` has a check of it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dynamo_megatron.runtime.user_code import UserFunction


@dataclass(frozen=True)
class LossInputs:
    """The r >= 1 response tokens that a rank has of one micro-batch, response by response.

    float32 [r] unless said otherwise; logprobs are natural logs, of softmax(logits / rollout.temperature).
    """

    logprobs: torch.Tensor  # of the policy that is trained; the only tensor with a gradient
    entropy: torch.Tensor  # nats, of the same policy
    old_logprobs: torch.Tensor  # of the policy that the step began with
    engine_logprobs: torch.Tensor  # of the server that sampled the tokens
    reference_logprobs: torch.Tensor | None  # of the reference policy; None where algorithm.kl.coef is 0
    advantages: torch.Tensor  # after entropy_shaping, where that is set
    weights: torch.Tensor  # normalised over the mini-batch, after entropy_top_ratio and rollout_correction; may be 0
    response: torch.Tensor  # int64 [r], ascending: which response of the micro-batch a token belongs to
    kl_coef: float = 0.0  # algorithm.kl.coef where kl.where is `function`; 0: there is no KL term, or it is added later


class TokenLosses(NamedTuple):
    loss: torch.Tensor  # floating point [r], no gradient
    gradient: torch.Tensor  # float32 [r]: the derivative of sum(weights * loss) with respect to the logprobs


@functools.cache
def load_loss(spec: str) -> UserFunction:
    """Loads the function "module:name". Raises ValueError (one line)."""
    return UserFunction.load(spec, "algorithm.loss.kind", "inputs")


def custom_losses(function: UserFunction, inputs: LossInputs) -> TokenLosses:
    """Returns the losses that `function` gives and their derivative. `inputs.logprobs` is a leaf that requires grad.

    Raises UserCodeError naming the function if it or its backward pass raises, or if it returns anything but floating
    point [r] that depends on the logprobs. Does not check that values are finite, which would wait for the GPU.
    """
    logprobs = inputs.logprobs
    assert logprobs.is_leaf and logprobs.requires_grad
    with torch.enable_grad():
        with function.named():
            loss = function.function(inputs)
        function.hold(_fits(loss, logprobs), f"returned {described(loss)}, not a tensor of {described(logprobs)}")
        function.hold(loss.requires_grad, "returned losses that have no gradient by inputs.logprobs")
        with function.named():
            summed = (inputs.weights * loss).sum()
            (gradient,) = torch.autograd.grad(summed, logprobs, allow_unused=True)
    function.hold(gradient is not None, "returned losses that have no gradient by inputs.logprobs")
    return TokenLosses(loss.detach(), gradient)


def _fits(loss: Any, like: torch.Tensor) -> bool:
    return (
        isinstance(loss, torch.Tensor)
        and loss.shape == like.shape
        and loss.is_floating_point()
        and loss.device == like.device
    )


def described(value: Any) -> str:
    """Describes a value that a user's function returned, for messages."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"
