"""What the built-in rewards read as the answer of a response."""

from __future__ import annotations

import hashlib

from dynamo_megatron.reward.extraction import after_thinking, fenced, final_answer
from dynamo_megatron.types import Prompt

LONGEST = 200  # characters


def extracted(function: str, prompt: Prompt, response: str, score: float) -> str | None:
    """What the reward `function`, which gave `score`, read as the answer, "" where it found none; None: it reads none.
    The SHA-256 of a text longer than LONGEST."""
    text = None
    match function:  # imports where they are needed: a worker has imported only its own functions
        case "math":
            from dynamo_megatron.reward.math_answer import compared_answer

            text = compared_answer(prompt, response, score)
        case "reasoning_gym":
            from dynamo_megatron.reward.procedural import extract_answer

            text = extract_answer(response, str(prompt.meta["reasoning_gym"]["entry"]["answer"]))
        case "qa_f1" | "qa_exact":
            from dynamo_megatron.reward.question_answering import normalised

            text = normalised(final_answer(response))
        case "choice":
            from dynamo_megatron.reward.question_answering import chosen

            text = chosen(response) or ""
        case "code":
            from dynamo_megatron.reward.code import PYTHON

            text = fenced(after_thinking(response) or "", PYTHON) or ""
    long = text is not None and len(text) > LONGEST
    return hashlib.sha256(text.encode(errors="replace")).hexdigest() if long else text
