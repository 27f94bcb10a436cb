"""The built-in reward `format`: does a response have the form that `reward.format` requires?"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from dynamo_megatron.config import RewardConfig
from dynamo_megatron.types import Prompt


def format_reward(config: RewardConfig) -> Callable[[Prompt, str], float]:
    """The reward function for `config.format`: 1.0 for a response of this form, else 0.0. `reward.deadline` stops a
    pattern that takes exponential time."""
    tags, pattern = config.format.tags, config.format.pattern
    if pattern is not None:
        compiled = re.compile(pattern, re.DOTALL)
        return lambda prompt, response: float(compiled.fullmatch(response) is not None)
    return lambda prompt, response: float(has_tags(response, tags))


def has_tags(response: str, tags: Sequence[str]) -> bool:
    """Returns True where `response` opens and closes each of `tags` exactly once, one after the other, with only white
    space outside the tags."""
    rest = response.strip()
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if response.count(opening) != 1 or response.count(closing) != 1 or not rest.startswith(opening):
            return False
        rest = rest.partition(closing)[2].lstrip()
    return not rest
