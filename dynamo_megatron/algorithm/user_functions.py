"""A user's own advantages and losses, which `algorithm.advantage.kind` and `algorithm.loss.kind` name as
"module:function"."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dynamo_megatron.algorithm.arrays import described
from dynamo_megatron.runtime.late import torch
from dynamo_megatron.runtime.user_code import UserFunction


@dataclass(frozen=True)
class AdvantageInputs:
    """The S rollouts of a step; the arrays are read-only. A group is the rollouts of one draw of a prompt, any number.

    A prompt that was drawn twice is two groups of one prompt_id. The rollouts of a group need not follow each other.
    """

    rewards: np.ndarray  # float64 [S], with the penalty of overlong_buffer where that is set
    successes: np.ndarray  # bool [S], by reward.success_threshold, without that penalty
    group: np.ndarray  # int64 [S], 0, 1, ...: groups counted in the order of their first rollout
    prompt_ids: tuple[str, ...]  # [S]
    response_lengths: np.ndarray  # int64 [S], tokens

    def __post_init__(self) -> None:
        for name in ("rewards", "successes", "group", "response_lengths"):
            view = getattr(self, name).view()
            view.setflags(write=False)
            object.__setattr__(self, name, view)


@functools.cache
def _load(key: str, spec: str) -> UserFunction:
    """Loads the function "module:name" of `key`. Raises ValueError (one line)."""
    return UserFunction.load(spec, f"algorithm.{key}", "inputs")


load_advantage = functools.partial(_load, "advantage.kind")
load_loss = functools.partial(_load, "loss.kind")


def custom_advantages(
    function: UserFunction, inputs: AdvantageInputs, gather: Callable[[str], list[str]] | None = None
) -> np.ndarray:
    """Returns the advantages of `function` for `inputs`, float64 [S]. Without rollouts `function` is not called.

    Every rank calls it, and all must get the same advantages. `gather` collects a text of every rank, in rank order;
    None: there is one rank. Raises UserCodeError naming the function if it raises, returns anything but finite float64
    [S], or returns other values when called again or on another rank.
    """
    rollouts = len(inputs.rewards)
    if rollouts == 0:
        return np.zeros(0)
    with function.named():
        advantages, again = function.function(inputs), function.function(inputs)
    wanted = f"float64 ({rollouts},)"
    function.hold(described(advantages) == wanted, f"returned {described(advantages)}, not a numpy array of {wanted}")
    if (bad := np.flatnonzero(~np.isfinite(advantages))).size:
        where = f"rollout {bad[0]}, of prompt {inputs.prompt_ids[bad[0]]!r}"
        function.hold(False, f"returned {advantages[bad[0]]} for {where}; give finite numbers")
    same = np.array_equal(advantages, again)
    function.hold(same, "returned other advantages when called again with the same inputs")
    if gather is not None:
        digests = gather(hashlib.sha256(advantages.tobytes()).hexdigest())
        other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        function.hold(other is None, f"returned other advantages on rank {other} than on rank 0 from the same inputs")
    return advantages


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


def custom_losses(function: UserFunction, inputs: LossInputs) -> TokenLosses:
    """Returns the losses that `function` gives and their derivative. `inputs.logprobs` is a leaf that requires grad.
    Raises UserCodeError naming the function if it or its backward pass raises, or if it returns anything but floating
    point [r] that depends on the logprobs. Does not check that values are finite, which would wait for the GPU."""
    logprobs = inputs.logprobs
    assert logprobs.is_leaf and logprobs.requires_grad
    with torch.enable_grad():
        with function.named():
            loss = function.function(inputs)
        fits = isinstance(loss, torch.Tensor) and loss.is_floating_point() and loss.device == logprobs.device
        fits = fits and loss.shape == logprobs.shape
        function.hold(fits, f"returned {described(loss)}, not a tensor of {described(logprobs)}")
        function.hold(loss.requires_grad, "returned losses that have no gradient by inputs.logprobs")
        with function.named():
            summed = (inputs.weights * loss).sum()
            (gradient,) = torch.autograd.grad(summed, logprobs, allow_unused=True)
    function.hold(gradient is not None, "returned losses that have no gradient by inputs.logprobs")
    return TokenLosses(loss.detach(), gradient)


def check_loss(function: UserFunction, *, reference: bool, kl_coef: float, context_parallel: bool) -> None:
    """Calls `function` with made-up tokens of three responses, and with those of each response alone.

    `reference`: with logprobs of a reference policy. Raises UserCodeError as `custom_losses`, and where the losses of a
    response depend on the other responses of its micro-batch; with `context_parallel`, also where the loss of a token
    depends on the other tokens of its response, since other ranks may have them.
    """
    rng, response = np.random.default_rng(0), np.repeat(np.arange(3), (3, 1, 8))
    count = len(response)
    old = -rng.exponential(1.5, count)
    arrays = {
        "logprobs": old + rng.normal(0, 0.3, count),
        "entropy": rng.exponential(0.8, count),
        "old_logprobs": old,
        "engine_logprobs": old + rng.normal(0, 0.01, count),
        "reference_logprobs": old + rng.normal(0, 0.3, count),
        "advantages": rng.normal(size=count),
        "weights": rng.uniform(0.5, 1, count) / count,
    }

    def losses(kept: np.ndarray) -> TokenLosses:
        tensors = {name: torch.tensor(values[kept], dtype=torch.float32) for name, values in arrays.items()}
        tensors["logprobs"].requires_grad_()
        if not reference:
            tensors["reference_logprobs"] = None
        own = torch.from_numpy(np.unique(response[kept], return_inverse=True)[1])
        return custom_losses(function, LossInputs(**tensors, response=own, kl_coef=kl_coef))

    def compare(part: np.ndarray, what: str) -> None:
        pairs = zip(whole, losses(part), strict=True)
        same = all(torch.allclose(a[part], b, rtol=1e-4, atol=1e-6, equal_nan=True) for a, b in pairs)
        function.hold(same, f"gives a response other losses {what}")

    whole = losses(np.ones(count, bool))
    for i in range(3):
        compare(response == i, "by itself than beside others, so that they would depend on micro_batch_tokens")
    if context_parallel:
        half = np.arange(count) % 2 == 0
        compare(half, "whose tokens are apart: with parallel.cp above 1 a rank has only a part of them; use cp 1")
