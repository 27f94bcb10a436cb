"""The built-in reward `choice`: the letter of a multiple-choice question."""

from __future__ import annotations

import re
import string
from typing import Any

from dynamo_megatron.reward.extraction import boxed, tagged
from dynamo_megatron.types import Prompt

# A capital letter by itself, with any marks around it: "(B)", "**B**", "B.". Not the pronoun I, nor "A" before a noun.
LETTER = re.compile(
    r"(?<![\w'’])(?!I['’ ])(?!A (?!(?:is|and|or|because|since|as|but|only|here|seems)\b)[a-z])([A-Z])(?![\w'’])"
)
ANOTHER = re.compile(r"[^\w\n,/&]*(?:,|/|&|\bor\b|\band\b)[^\w\n]*(?:and\b|or\b)?[^\w\n]*" + LETTER.pattern)
STATED = re.compile(r"\b(?:answer|choice|option)\b(?:[ \t]+is\b|[ \t*]*:)([^\n]{0,200})", re.IGNORECASE)
MARKUP = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\b")


def choice_answer(prompt: Prompt, response: str) -> float:
    r"""Returns 1.0 where the letter that `response` chooses is `prompt.answer`, else 0.0.

    `prompt.answer` is a letter ("B", "(B)"), or the index of a letter as an integer, 0 for A. Raises ValueError for
    anything else. `chosen` defines which letter a response chooses.
    """
    return float(chosen(response) == _right(prompt.answer))


def chosen(response: str) -> str | None:
    r"""The letter in the last `<answer>` tag, else in the last `\boxed{}`, else after the last "answer is X" or
    "Answer: X", else the last capital letter by itself. None where there is no letter, or where one of the first three
    places has several.
    """
    for find in (tagged, boxed):
        inside = find(response)
        if inside is not None:
            text = MARKUP.sub("", inside)
            bare = text.strip(string.whitespace + string.punctuation)
            return bare.upper() if re.fullmatch("[a-z]", bare) else _first(text)
    for text in reversed(STATED.findall(response)):
        letter = LETTER.search(text)
        if letter and not re.search(r"\bnot\b|n['’]t\b", text[: letter.start()]):
            return _first(text)
    letters = LETTER.findall(response)
    return letters[-1] if letters else None


def _first(text: str) -> str | None:
    letter = LETTER.search(text)
    return None if letter is None or ANOTHER.match(text, letter.end()) else letter[1]


def _right(answer: Any) -> str:
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(string.ascii_uppercase):
        return string.ascii_uppercase[answer]
    bare = answer.strip(string.whitespace + string.punctuation) if isinstance(answer, str) else ""
    if not re.fullmatch("[A-Za-z]", bare):
        raise ValueError(f"the choice reward needs a letter as the answer, or its index from 0, not {answer!r:.200}")
    return bare.upper()
