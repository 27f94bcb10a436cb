"""The outcome of one reward function on one response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynamo_megatron.errors import InputError
from dynamo_megatron.reward.functions import Step


@dataclass(frozen=True)
class Outcome:
    """`state` is one of `types.REWARD_STATES`. Where it is "scored", `value` is the score and `steps` has the scores of
    steps, if any. Otherwise `text` says in one line what went wrong, and `frames` where in the user's files."""

    function: str
    state: str
    value: float = 0.0
    steps: Sequence[Step] = ()
    text: str = ""
    frames: str = ""


class RewardError(InputError):
    """A reward function failed. The last line of the message has the function, the prompt id, and the error's type and
    text; the lines before it have the user's stack frames, the prompt and the response."""


class NoScore(Exception):
    """An attempt gave no score. The message is one line; `state` is the state of the outcome."""

    def __init__(self, text: str, state: str = "wrong_format") -> None:
        super().__init__(text)
        self.state = state
