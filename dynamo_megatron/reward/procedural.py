"""The built-in reward `reasoning_gym`: the score that a reasoning-gym dataset gives to the response's answer."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from dynamo_megatron.data.sources import reasoning_gym_dataset
from dynamo_megatron.reward.extraction import Graded, after_thinking, boxed, last_number, tagged
from dynamo_megatron.types import Prompt

# Some datasets give 0.01 or 0.05 to an empty answer, others to any text. A score that these answers would get earns no
# reward.
WORTHLESS = ("", None, "?")


def reasoning_gym_answer(prompt: Prompt, response: str) -> float:
    r"""The dataset's score in [0, 1] of the answer in `response`, or 0 where no answer or "?" would get at least that.

    An answer that makes the scorer raise gets 0. Raises ValueError where the prompt does not come from a
    `reasoning_gym:` source.
    """
    if "reasoning_gym" not in prompt.meta:
        raise ValueError("the reasoning_gym reward needs prompts of a reasoning_gym: source")
    meta = prompt.meta["reasoning_gym"]
    entry = meta["entry"]
    dataset = _dataset(meta["dataset"], json.dumps(meta["options"]))
    answer = extract_answer(response, str(entry["answer"]))
    score = _score(dataset, answer, entry)
    earned = score >= 1.0 or score > max(_score(dataset, each, entry) for each in WORTHLESS)
    return Graded(min(score, 1.0) if earned else 0.0, answer)


def extract_answer(response: str, right_answer: str) -> str:
    r"""The content of the last `<answer>` tag, else of the last `\boxed{}`; else the last number where `right_answer`
    is a number, all of the text where it has several lines, else the first line."""
    text = (after_thinking(response) or "").strip()
    for find in (tagged, boxed):
        found = find(text)
        if found is not None:
            return found
    if re.fullmatch(r"-?\d+(\.\d+)?", right_answer):
        return last_number(text) or ""
    return text if "\n" in right_answer.strip() else text.partition("\n")[0].strip()


@lru_cache(maxsize=64)
def _dataset(name: str, options: str) -> Any:
    return reasoning_gym_dataset(name, json.loads(options))


def _score(dataset: Any, answer: str | None, entry: dict[str, Any]) -> float:
    try:
        return float(dataset.score_answer(answer, entry))
    except Exception:  # scorers may raise anything on a text that they cannot parse: a wrong answer
        return 0.0
