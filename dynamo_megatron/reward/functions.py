"""Reward functions by name, and what they may return (docs/rewards.md)."""

from __future__ import annotations

import math
import numbers
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dynamo_megatron.config import Config, RewardConfig
from dynamo_megatron.config.reward import COMPARING
from dynamo_megatron.errors import InputError
from dynamo_megatron.reward.extraction import after_thinking
from dynamo_megatron.runtime.plain_text import error_line, on_one_line
from dynamo_megatron.runtime.user_code import UserFunction, load_callable
from dynamo_megatron.types import LARGEST_REWARD, Prompt

# Names, not imports: reasoning-gym takes seconds to import, and a run needs at most one of these functions.
BUILT_IN = {
    "math": "dynamo_megatron.reward.math_answer:math_answer",
    "reasoning_gym": "dynamo_megatron.reward.procedural:reasoning_gym_answer",
    "qa_f1": "dynamo_megatron.reward.question_answering:qa_f1",
    "qa_exact": "dynamo_megatron.reward.question_answering:qa_exact",
    "qa_sources": "dynamo_megatron.reward.question_answering:qa_sources",
    "choice": "dynamo_megatron.reward.question_answering:choice_answer",
    "json_schema": "dynamo_megatron.reward.json_schema:json_schema",
}
# These functions are built from the configuration: they have settings of their own.
CONFIGURED = {
    "format": "dynamo_megatron.reward.functions:format_reward",
    "length": "dynamo_megatron.reward.functions:length_reward",
    "code": "dynamo_megatron.reward.code:code_reward",
}
Step = tuple[int, int, float]  # (start, end, reward): the response's characters [start, end)
SERVICES = ("judge", "reward_model")  # also behind HTTP; their configuration sections have the addresses


@dataclass(frozen=True)
class FunctionResult:
    """What one reward function gave one response. If `state` (`types.REWARD_STATES`) is "scored", `value` is the score,
    `steps` has the scores of steps, and `answer` that of a `Graded` value. Otherwise `text` says in one line what went
    wrong, and `frames` where in the user's files."""

    function: str
    state: str
    value: float = 0.0
    steps: Sequence[Step] = ()
    text: str = ""
    frames: str = ""
    answer: str | None = None


class RewardError(InputError):
    """A reward function failed. The last line of the message names function, prompt and error; the lines before it have
    the user's stack frames, the prompt and the response."""


class NoScore(Exception):
    """A service gave no score. The message is one line; `state` is the state of the result."""

    def __init__(self, text: str, state: str = "wrong_format") -> None:
        super().__init__(text)
        self.state = state


def load_function(name: str, config: RewardConfig | None = None) -> Callable[[Prompt, str], Any]:
    """The reward function `name`: a built-in one or `module:function`. `config`: None has the defaults. A built-in one
    reads the response with the marker of thinking that the prompt ends with. Raises ValueError (one line) where there
    is no such function, and where `code` has no sandbox on this machine."""
    if name in CONFIGURED:
        function = load_callable(CONFIGURED[name], "reward.functions")(config or RewardConfig())
    else:
        function = UserFunction.load(BUILT_IN.get(name, name), "reward.functions", "prompt", "response").function
        if name not in BUILT_IN:
            return function
    return lambda prompt, response: function(prompt, prompt.thinking + response)


def check_answers(prompts: Iterable[Prompt], config: Config) -> None:
    """Raises InputError naming the first row whose answer a built-in function of the run cannot read: scoring a
    response to it would end the run. Nothing is checked with `reward.on_error: zero`, nor with an agent, which may give
    the reward itself."""
    if config.rollout.agent is not None or config.reward.on_error == "zero":
        return
    names = [name for name in config.reward.functions if name in COMPARING or name == "qa_sources"]
    functions = {name: load_function(name, config.reward) for name in names}
    for prompt in prompts:
        for name, function in functions.items():
            try:
                function(prompt, "")
            except Exception as error:  # of rows that nobody thought of, as in a worker
                why = on_one_line(str(error), 300) if isinstance(error, ValueError) else error_line(error, 300)
                raise InputError(
                    f"prompt {prompt.label}: {why} (reward {name}); mend the row or leave it out, or with "
                    "reward.on_error=zero let it score 0"
                ) from None


def checked(value: Any) -> float:
    """`value` as a float. Raises ValueError where it is not finite, or larger than LARGEST_REWARD in absolute value."""
    if not isinstance(value, numbers.Real | np.bool_):
        kind = "" if value is None else f" of type {type(value).__name__}"
        raise ValueError(f"returned {value!r:.80}{kind}, not a number")
    if not abs(value) <= LARGEST_REWARD:
        limit = f", of more than {LARGEST_REWARD:g} in size" if math.isfinite(value) else ""
        raise ValueError(f"returned {float(value):g}{limit}")
    return float(value)


def checked_steps(value: Any, characters: int) -> tuple[float, list[Step]]:
    """Parses what a function has returned for a response of `characters` characters: (reward, steps, if any).

    Raises ValueError for a reward that `checked` refuses, and for anything but a number or {"reward": number, "steps":
    [(start, end, number), ...]} with steps in order and without overlap.
    """
    if not isinstance(value, Mapping):
        return checked(value), []
    if set(value) != {"reward", "steps"} or not isinstance(value["steps"], list | tuple):
        raise ValueError(f"returned {value!r:.80}, which is not of the form {{reward: number, steps: [...]}}")
    steps: list[Step] = []
    for number, step in enumerate(value["steps"], 1):
        before = steps[-1][1] if steps else 0
        try:
            start, end, reward = step
            if not before <= operator.index(start) < operator.index(end) <= characters:
                raise ValueError(f"its characters are {before} to {characters} at most")
            steps.append((int(start), int(end), checked(reward)))
        except (ValueError, TypeError) as error:
            raise ValueError(f"returned {step!r:.80} as step {number}, not (start, end, reward): {error}") from None
    return checked(value["reward"]), steps


def format_reward(config: RewardConfig) -> Callable[[Prompt, str], float]:
    """The built-in reward `format`: 1.0 for a response of the form `config.format`, else 0.0. `reward.deadline` stops a
    pattern that takes exponential time."""
    tags, pattern = config.format.tags, config.format.pattern
    if pattern is None:  # each tag once, one after the other, with only white space outside
        inside = rf"(?:(?!</?(?:{'|'.join(tags)})>).)*"
        pattern = r"\s*".join(["", *(f"<{tag}>{inside}</{tag}>" for tag in tags), ""])
    compiled = re.compile(pattern, re.DOTALL)
    return lambda prompt, response: float(compiled.fullmatch(response) is not None)


def length_reward(config: RewardConfig) -> Callable[[Prompt, str], float]:
    """The built-in reward `length`: 1.0 up to `config.length.words` words (what white space separates) after the last
    `</think>`, from there linearly to 0.0 at twice as many; 0.0 without words."""
    most = config.length.words

    def length(prompt: Prompt, response: str) -> float:
        words = len((after_thinking(response) or "").split())
        return min(1.0, max(0.0, 2.0 - words / most)) if words else 0.0

    return length
