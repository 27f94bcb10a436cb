"""Reward functions by name, and what they may return.

A reward function is `fn(prompt: Prompt, response: str) -> float`: finite, of size 1e18 at most. One that runs
elsewhere is a URL (`http.py`).
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

import numpy as np

from dynamo_megatron.config import RewardConfig
from dynamo_megatron.runtime.user_code import UserFunction, load_callable
from dynamo_megatron.types import LARGEST_REWARD, Prompt

# Named, not imported: math-verify and reasoning-gym take seconds to import, and a run needs at most one of them.
BUILT_IN = {
    "math": "dynamo_megatron.reward.math_answer:math_answer",
    "reasoning_gym": "dynamo_megatron.reward.procedural:reasoning_gym_answer",
    "qa_f1": "dynamo_megatron.reward.question_answering:qa_f1",
    "qa_exact": "dynamo_megatron.reward.question_answering:qa_exact",
    "choice": "dynamo_megatron.reward.choice:choice_answer",
}
# These are made from the configuration: they have settings of their own.
CONFIGURED = {
    "format": "dynamo_megatron.reward.response_format:format_reward",
    "code": "dynamo_megatron.reward.code_answer:code_reward",
}
URLS = ("http://", "https://")


def load_function(name: str, config: RewardConfig) -> Callable[[Prompt, str], float]:
    """The reward function `name`: a built-in one or `module:function`. Raises ValueError (one line), also where there
    is no sandbox for `code`."""
    if name in CONFIGURED:
        return load_callable(CONFIGURED[name], "reward.functions")(config)
    if ":" not in name and name not in BUILT_IN:
        known = ", ".join([*BUILT_IN, *CONFIGURED])
        raise ValueError(f"reward.functions: no built-in {name!r}; give {known}, module:function or an http:// URL")
    return UserFunction.load(BUILT_IN.get(name, name), "reward.functions", "prompt", "response").function


def checked(value: Any) -> float:
    """`value` as a float. Raises ValueError for what is no finite number or larger than LARGEST_REWARD."""
    if not isinstance(value, numbers.Real | np.bool_):
        kind = "" if value is None else f" of type {type(value).__name__}"
        raise ValueError(f"returned {value!r:.80}{kind}, not a number")
    if not math.isfinite(value):
        raise ValueError(f"returned {value}")
    if abs(value) > LARGEST_REWARD:
        raise ValueError(f"returned {float(value):g}, of more than {LARGEST_REWARD:g} in size")
    return float(value)
