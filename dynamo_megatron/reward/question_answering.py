"""The built-in rewards `qa_f1` and `qa_exact`: a short answer in words against references, compared as SQuAD does."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dynamo_megatron.reward.extraction import final_answer
from dynamo_megatron.types import Prompt

ARTICLES = re.compile(r"\b(a|an|the)\b")
# Besides SQuAD's: typographic and full-width marks.
MARKS = [mark for mark in map(chr, range(128, 1 << 16)) if unicodedata.category(mark).startswith("P")]
PUNCTUATION = str.maketrans("", "", string.punctuation + "".join(MARKS))
REFERENCES = ("text", "target", "aliases")  # the list's name in SQuAD, Search-R1 and TriviaQA


def qa_exact(prompt: Prompt, response: str) -> float:
    """1.0 where the final answer of `response` equals one of the `references` after `normalised`, else 0.0. A reference
    of which `normalised` leaves nothing ("A", "+") is compared in lower case as it is. Raises ValueError for a
    `prompt.answer` without references."""
    answer = final_answer(response)
    return float(any(ours == right for ours, right in _compared(answer, references(prompt.answer))))


def qa_f1(prompt: Prompt, response: str) -> float:
    """The largest token F1 between the final answer and a reference; 1.0 where they are equal. Final answer, references
    and errors are as for `qa_exact`."""
    answer = final_answer(response)
    return max(_f1(ours.split(), right.split()) for ours, right in _compared(answer, references(prompt.answer)))


def references(answer: Any) -> list[str]:
    """The right answers: `answer` itself, or the items of a list, or the values of a mapping under "value", "text",
    "target" and "aliases". Raises ValueError where none of these is text or a number."""
    found = answer
    if isinstance(answer, Mapping):
        found = [answer["value"]] if "value" in answer else []
        for name in REFERENCES:
            listed = answer.get(name, [])
            found += listed if isinstance(listed, list) else [listed]
    found = found if isinstance(found, list) else [found]
    texts = [str(each) for each in found if isinstance(each, str | int | float) and str(each).strip()]
    if not texts:
        raise ValueError(f"the question-answering reward needs text, a number or a list of them, not {answer!r:.200}")
    return texts


def normalised(text: str) -> str:
    """`text` in lower case, without punctuation, articles and repeated white space, removed in SQuAD's order."""
    text = unicodedata.normalize("NFC", text)
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def _compared(answer: str, right: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The answer and each reference as they are compared."""
    ours = normalised(answer)
    for reference in right:
        left = normalised(reference)
        yield (ours, left) if left else (answer.strip().lower(), reference.strip().lower())


def _f1(answer: list[str], reference: list[str]) -> float:
    if answer == reference:
        return 1.0
    common = sum((Counter(answer) & Counter(reference)).values())
    return 2 * common / (len(answer) + len(reference)) if common else 0.0
