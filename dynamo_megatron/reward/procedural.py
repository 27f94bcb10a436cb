"""The built-in reward `reasoning_gym`: the score that a reasoning-gym dataset gives to the response's answer."""

from __future__ import annotations

import ast
import json
import re
import sys
from fractions import Fraction
from functools import lru_cache
from typing import Any

from dynamo_megatron.data.sources import reasoning_gym_dataset
from dynamo_megatron.reward.extraction import Graded, after_thinking, boxed, last_number, tagged
from dynamo_megatron.types import Prompt

# Some datasets give 0.01 or 0.05 to an empty answer or 0, others to any text. A score that these answers would get
# earns no reward.
WORTHLESS = ("", None, "?", "0")
NO_NUMBER = re.compile(r"\b(?:nan|inf(?:inity)?)\b", re.IGNORECASE)  # gets 1 where exp(-distance) is the score
# Their scorers evaluate the answer as Python: as a list, or with sympy, whose names give a policy the whole process.
LISTS = ("string_insertion", "spiral_matrix", "binary_matrix", "n_queens")
FORMULAS = ("countdown", "puzzle24", "simple_integration", "intermediate_integration", "polynomial_multiplication")
NAME = re.compile(r"[^\W\d]\w*")
NAMES = {kind + name for kind in ("", "a", "arc") for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")} | {
    *("exp", "log", "ln", "sqrt", "pi", "Abs", "abs", "sec", "csc", "cot")
}


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
    right = str(entry["answer"]).strip()
    if answer == right:
        return Graded(1.0, answer)
    if NO_NUMBER.search(answer) and not NO_NUMBER.search(right):
        return Graded(0.0, answer)
    score = _score(dataset, meta["dataset"], answer, entry)
    worthless = max(_score(dataset, meta["dataset"], each, entry) for each in WORTHLESS if each != right)
    return Graded(min(score, 1.0) if score > worthless else 0.0, answer)


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
    dataset = reasoning_gym_dataset(name, json.loads(options))
    if name in LISTS:
        sys.modules[type(dataset).__module__].eval = ast.literal_eval  # type: ignore[attr-defined]
    return dataset


def _score(dataset: Any, name: str, answer: str | None, entry: dict[str, Any]) -> float:
    if name in FORMULAS and any(len(each) > 1 and each not in NAMES for each in NAME.findall(answer or "")):
        return 0.0
    try:
        if name == "coin_flip":  # its score of 0 is 1 beside 0.25
            return float(abs(Fraction(answer) - Fraction(entry["answer"])) <= 1e-4)
        return float(dataset.score_answer(answer, entry))
    except Exception:  # scorers may raise anything on a text that they cannot parse: a wrong answer
        return 0.0
