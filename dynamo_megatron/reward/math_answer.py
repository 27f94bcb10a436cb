"""The built-in reward `math`: is the response's final answer mathematically equal to the prompt's?"""

from __future__ import annotations

import logging
import re
from decimal import Decimal
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

from dynamo_megatron.reward.extraction import boxed, join_thousands, last_line, last_number
from dynamo_megatron.types import Prompt

# math-verify's own time limit needs SIGALRM, so the pool's deadline is the limit here. Its warning on each call is of
# no use.
logging.getLogger("math_verify").setLevel(logging.ERROR)

# Spans of bounded length, so that opening marks without a closing one do not cost a quadratic search.
LATEX = re.compile(r"\$\$(.{1,1000}?)\$\$|\$([^$\n]{1,1000})\$|\\\((.{1,1000}?)\\\)|\\\[(.{1,1000}?)\\\]", re.DOTALL)
MARKED = re.compile(r"^####[ \t]*(\S*[\d\\]\S*)[ \t]*$", re.MULTILINE)  # "#### Step 1: add" is a heading, not an answer
# math-verify parses 4.5e33 as a product with e, and rounds numbers to six decimal places before it compares them.
SCIENTIFIC = re.compile(r"(?<![\w.}])([0-9]{1,1000}(?:\.[0-9]{0,1000})?|\.[0-9]{1,1000})[eE]([-+]?[0-9]{1,3})(?!\w)")
DECIMAL = re.compile(
    r"([-+]?(?:[0-9]{1,1000}(?:\.[0-9]{0,1000})?|\.[0-9]{1,1000}))"
    r"(?:\s*\\(?:times|cdot)\s*10\s*\^\s*(?:\{([-+]?[0-9]{1,3})\}|([0-9])))?(?:\s*\\?%)?"
)
BASED = re.compile(r"[0-9][0-9A-F]{0,1000}_\{?([0-9]{1,3})\}?")  # 2516_8
LINE_GAP = re.compile(r"\\\\\s*\[-?[0-9.]{1,9} ?(?:pt|em|ex|mm|cm)\]")  # between the rows of a matrix
ROUNDING = Decimal("5e-7")  # math-verify's, between decimal numbers


def math_answer(prompt: Prompt, response: str) -> float:
    r"""Returns 1.0 where the final answer of `response` equals `prompt.answer`, else 0.0.

    The final answer is the last complete `\boxed{}`, else the last line of the form `#### 72`, else the last LaTeX span
    or number, whichever comes later. Where `prompt.answer` is in words, the last line without "the answer is" takes the
    place of the LaTeX span or number. Two answers are equal if their texts are the same up to spacing and LaTeX
    formatting, or if math-verify considers them equal (so 1/2 = 0.5, {1,2} = {2,1}, and also 10% = 10 and 3+4 = 7: an
    answer that is not worked out counts).
    `prompt.answer` is a number or text: plain, LaTeX, or a solution that ends in `\boxed{}` or `#### 72`. Raises
    ValueError for anything else.
    """
    reference = _reference(prompt.answer)
    words = _in_words(reference)
    found = _final_answer(response, words)
    if found is None:
        return 0.0
    candidate = _clean(found)
    if words:
        return float(_plain(candidate).casefold() == _plain(reference).casefold())
    if _plain(candidate) == _plain(reference):
        return 1.0
    reference, candidate = _right_sides(reference, candidate)
    wanted, given = _decimal(reference), _decimal(candidate)
    if wanted is not None and given is not None:  # math-verify would take a millisecond
        near = abs(wanted - given) <= ROUNDING * min(Decimal(1), abs(wanted))
        if near or "%" not in reference + candidate:
            return float(near)
    bases = [BASED.fullmatch(_plain(text)) for text in (reference, candidate)]
    if all(bases) and bases[0][1] != bases[1][1]:  # math-verify ignores the base
        return 0.0
    target = parse(f"\\boxed{{{candidate}}}", parsing_timeout=None)
    gold = _parsed_reference(reference)
    return float(bool(gold and target and verify(gold, target, timeout_seconds=None)))


@lru_cache(maxsize=1024)
def _parsed_reference(reference: str) -> list[Any]:
    return parse(f"\\boxed{{{reference}}}", parsing_timeout=None)


def _right_sides(reference: str, candidate: str) -> tuple[str, str]:
    """The right-hand sides, where both are one equation and have the same left-hand side (y = 2x and y = x + x); else
    the arguments."""
    (left, *right), (other, *given) = reference.split("="), candidate.split("=")
    if len(right) == len(given) == 1 and _plain(left) == _plain(other):
        return right[0].strip(), given[0].strip()
    return reference, candidate


def _reference(answer: Any) -> str:
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    if isinstance(answer, float):
        answer = format(Decimal(repr(answer)), "f")  # never 1e-05, which math-verify parses as a product with e
    if not isinstance(answer, str | int) or not str(answer).strip():
        raise ValueError(f"the math reward needs an answer that is text or a number, not {answer!r}")
    text = str(answer)
    inside = boxed(text)
    return _clean(inside if inside is not None else text.rpartition("####")[2])


def _final_answer(response: str, words: bool) -> str | None:
    inside = boxed(response)
    if inside is not None:
        return inside
    marked = MARKED.findall(response)
    if marked:
        return marked[-1]
    if words:
        return last_line(response) or None
    spans = list(LATEX.finditer(response))
    end = spans[-1].end() if spans else 0
    number = last_number(response[end:])
    if number is not None or not spans:
        return number
    return next(group for group in spans[-1].groups() if group is not None)


def _clean(text: str) -> str:
    text = text.replace("\\$", "").replace("$", "").strip().rstrip(".*").lstrip("*")
    text = LINE_GAP.sub(r"\\\\", text.replace(r"\varnothing", r"\emptyset"))
    return SCIENTIFIC.sub(r"\1 \\times 10^{\2}", join_thousands(text.strip()))


def _decimal(text: str) -> Decimal | None:
    r"""The exact value of a decimal number, also with `\times 10^{n}`; a percent sign is ignored. None for other
    text."""
    found = DECIMAL.fullmatch(text)
    return Decimal(f"{found[1]}e{found[2] or found[3] or 0}") if found else None


def _plain(text: str) -> str:
    """`text` without LaTeX formatting and spaces: the same for texts that differ only in these."""
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf|mbox)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\(?:left|right)(?![A-Za-z])|\\[!,;: ]|\^\{?\\circ\}?", "", text)
    return re.sub(r"\s+", "", text)


def _in_words(reference: str) -> bool:
    """Returns True where the answer is in words: math-verify would parse "even" as a product, equal to "neve"."""
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", reference)
    return bool(re.fullmatch(r"[^\W\d_][^\d\\_^={}+*/<>]*", text) and re.search(r"[^\W\d_]{4,}", text))
