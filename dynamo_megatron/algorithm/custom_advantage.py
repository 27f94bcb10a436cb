"""Advantages from a user's function, `algorithm.advantage.kind: module:function`; `testing.py` has a check of it."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

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
def load_advantage(spec: str) -> UserFunction:
    """Loads the function "module:name". Raises ValueError (one line)."""
    return UserFunction.load(spec, "algorithm.advantage.kind", "inputs")


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
        advantages = function.function(inputs)
        again = function.function(inputs)
    fits = isinstance(advantages, np.ndarray) and advantages.dtype == np.float64 and advantages.shape == (rollouts,)
    given = (
        f"{advantages.dtype} {advantages.shape}" if isinstance(advantages, np.ndarray) else type(advantages).__name__
    )
    function.hold(fits, f"returned {given}, not a numpy array of float64 ({rollouts},)")
    if (bad := np.flatnonzero(~np.isfinite(advantages))).size:
        which = f"rollout {bad[0]}, of prompt {inputs.prompt_ids[bad[0]]!r}"
        function.hold(False, f"returned {advantages[bad[0]]} for {which}; advantages have to be finite")
    function.hold(np.array_equal(advantages, again), "returned other advantages when called again with the same inputs")
    if gather is not None:
        digests = gather(hashlib.sha256(advantages.tobytes()).hexdigest())
        other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        function.hold(other is None, f"returned other advantages on rank {other} than on rank 0 from the same inputs")
    return advantages
