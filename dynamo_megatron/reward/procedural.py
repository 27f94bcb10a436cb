"""The built-in reward `reasoning_gym`: the score that a reasoning-gym dataset gives to the response's answer."""

from __future__ import annotations

import ast
import cmath
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
# Scorers that evaluate the answer as a Python list, and those that give it to sympy, which evaluates it, too: names,
# strings and escapes in it could take over the process.
LISTS = ("string_insertion", "spiral_matrix", "binary_matrix", "n_queens")
ARITHMETIC = re.compile(r"(?!.*(?:\*\*|//))[\d\s+\-*/()]*", re.ASCII | re.DOTALL)  # of whole numbers, without powers
FORMULA = re.compile(r"[\w\s+\-*/^(),.]*", re.ASCII)
HUGE = re.compile(r"[eE][-+]?\d{3}")  # a power that takes minutes
NAME = re.compile(r"[A-Za-z_]\w*")
NAMES = {kind + name for kind in ("", "a", "arc") for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")} | {
    *("exp", "log", "ln", "sqrt", "pi", "Abs", "abs", "sec", "csc", "cot", "Rational", "C1", "C_1")
}


def reasoning_gym_answer(prompt: Prompt, response: str) -> float:
    r"""The dataset's score in [0, 1] of the answer in `response`, or 0 where no answer, "?" or a wrong 0 would get at
    least that. The dataset's own answer gets 1.

    An answer that makes the scorer raise, or that the scorer may not see (`_refused`), gets 0. Raises ValueError where
    the prompt does not come from a `reasoning_gym:` source.
    """
    if "reasoning_gym" not in prompt.meta:
        raise ValueError("the reasoning_gym reward needs prompts of a reasoning_gym: source")
    meta = prompt.meta["reasoning_gym"]
    entry = meta["entry"]
    dataset = _dataset(meta["dataset"], json.dumps(meta["options"]))
    answer = extract_answer(response, str(entry["answer"]))
    right, name = entry["answer"], meta["dataset"]
    if isinstance(right, bool):  # the scorer takes every text for True
        return Graded(float(answer.strip(" .").lower() == str(right).lower()), answer)
    if right is not None and answer == str(right).strip():
        return Graded(1.0, answer)
    score = _score(dataset, name, answer, entry)
    scores = {each: _score(dataset, name, each, entry) for each in WORTHLESS if score > 0}
    worthless = max((value for each, value in scores.items() if each != "0" or value < 1), default=0.0)
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
    try:
        if answer is not None and _refused(dataset, name, answer, entry):
            return 0.0
        return float(dataset.score_answer(answer, entry))
    except Exception:  # scorers may raise anything on a text that they cannot parse: a wrong answer
        return 0.0


def _refused(dataset: Any, name: str, answer: str, entry: dict[str, Any]) -> bool:
    """Whether the dataset's scorer would run `answer`, or pay for it blindly. May raise what the scorer may."""
    match name:
        case "simple_integration" | "intermediate_integration" | "polynomial_multiplication":
            named = any(len(each) > 1 and each not in NAMES for each in NAME.findall(answer))
            return named or not FORMULA.fullmatch(answer)
        case "countdown":
            return not ARITHMETIC.fullmatch(answer)
        case "puzzle24":  # the scorer looks neither at which numbers are used nor behind the decimal point
            used = sorted(map(int, re.findall(r"\d+", answer)))
            wrong = used != sorted(entry["metadata"]["numbers"]) or not ARITHMETIC.fullmatch(answer)
            return wrong or sys.modules[type(dataset).__module__].parse_expr(answer) != 24
        case "number_sorting":
            return "nan" in answer.lower()
        case "complex_arithmetic":  # exp(-distance) is 1 for nan
            return not cmath.isfinite(dataset.parse_string_to_complex(answer))
        case "coin_flip":  # the longest common beginning: 0 for 0.25
            right = Fraction(entry["answer"])
            return HUGE.search(answer) is not None or abs(Fraction(answer) - right) > right / 100
        case "rubiks_cube":  # it makes as many turns
            return re.search(r"\d{3}", answer) is not None
    return False
