"""What the built-in rewards read as the answer of a response."""

from __future__ import annotations

import hashlib

from dynamo_megatron.reward.extraction import after_thinking, fenced, final_answer
from dynamo_megatron.types import Prompt

LONGEST = 200  # characters


def extracted(function: str, prompt: Prompt, response: str, score: float) -> str | None:
    """What the reward `function`, which gave `score`, read as the answer, "" where it found none; None: it reads none.
    The SHA-256 of a text longer than LONGEST."""
    text = _read(function, prompt, response, score)
    if text is None or len(text) <= LONGEST:
        return text
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


def _read(function: str, prompt: Prompt, response: str, score: float) -> str | None:
    # Imported where they are needed, since a worker has imported only its own functions.
    match function:
        case "math":
            from dynamo_megatron.reward.math_answer import compared_answer

            return compared_answer(prompt, response, score)
        case "reasoning_gym":
            from dynamo_megatron.reward.procedural import extract_answer

            return extract_answer(response, str(prompt.meta["reasoning_gym"]["entry"]["answer"]))
        case "qa_f1" | "qa_exact":
            from dynamo_megatron.reward.question_answering import normalised

            return normalised(final_answer(response))
        case "choice":
            from dynamo_megatron.reward.question_answering import chosen

            return chosen(response) or ""
        case "code":
            from dynamo_megatron.reward.code import PYTHON

            return fenced(after_thinking(response) or "", PYTHON) or ""
    return None
