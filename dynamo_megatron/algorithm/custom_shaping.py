"""Advantages of tokens from a user's function, `algorithm.advantage.entropy_shaping: module:function`."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from dynamo_megatron.algorithm.custom_loss import described
from dynamo_megatron.runtime.user_code import UserFunction


@dataclass(frozen=True)
class TokenInputs:
    """The n response tokens of a mini-batch, response by response, the same on every rank.

    float32 [n] on the CPU unless said otherwise, of the policy that the step began with: p = softmax(logits /
    rollout.temperature), natural logs.
    """

    advantages: torch.Tensor  # float64, of the token's rollout; with kind otb or process rewards of the token
    logprobs: torch.Tensor
    entropy: torch.Tensor  # H, nats
    expected_pi_lambda: torch.Tensor  # sum_v p_v^2 (log p_v + H)
    collision: torch.Tensor  # sum_v p_v^2
    response: torch.Tensor  # int64, ascending: which of `rollout_ids` a token belongs to
    rollout_ids: tuple[str, ...]  # of the mini-batch's rollouts; a step has each once


@functools.cache
def load_shaping(spec: str) -> UserFunction:
    """Loads the function "module:name". Raises ValueError (one line)."""
    return UserFunction.load(spec, "algorithm.advantage.entropy_shaping", "inputs")


def custom_shaping(function: UserFunction, inputs: TokenInputs) -> torch.Tensor:
    """Returns the tokens' advantages from `function`, float64 [n]. Without tokens `function` is not called.

    Raises UserCodeError naming the function if it raises, returns anything but finite float64 [n], or returns other
    values when called again with the same inputs.
    """
    if len(inputs.advantages) == 0:
        return inputs.advantages
    with function.named():
        advantages = function.function(inputs)
        again = function.function(inputs)
    given, wanted = described(advantages), described(inputs.advantages)
    function.hold(given == wanted, f"returned {given}, not a tensor of {wanted}")
    if len(bad := (~torch.isfinite(advantages)).nonzero()[:, 0]):
        name = inputs.rollout_ids[int(inputs.response[bad[0]])]
        function.hold(False, f"returned {float(advantages[bad[0]])} for a token of rollout {name}; give finite numbers")
    function.hold(torch.equal(advantages, again), "returned other advantages when called again with the same inputs")
    return advantages
