"""The built-in rewards `qa_f1` and `qa_exact`, a short answer in words against references, compared as SQuAD does,
`qa_sources`, the sources that the response cites, and `choice`, the letter of a multiple-choice question."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dynamo_megatron.reward.extraction import MARKUP, Graded, after_thinking, boxed, final_answer, tagged
from dynamo_megatron.types import Prompt

ARTICLES = re.compile(r"\b(a|an|the)\b")
# Besides SQuAD's: typographic and full-width marks.
MARKS = [mark for mark in map(chr, range(128, 1 << 16)) if unicodedata.category(mark).startswith("P")]
PUNCTUATION = str.maketrans("", "", string.punctuation + "".join(MARKS))
CITATION = re.compile(r"\[([^\[\]\n]{1,200})\]")
REFERENCES = ("text", "target", "aliases")  # the list's name in SQuAD, Search-R1 and TriviaQA
# A capital letter by itself, with any marks around it: "(B)", "**B**", "B.". Not the pronoun I, nor "A" before a noun.
LETTER = re.compile(
    r"(?<![\w'’])(?!I['’ ])(?!A (?!(?:is|and|or|because|since|as|but|only|here|seems)\b)[a-z])([A-Z])(?![\w'’])"
)
ANOTHER = re.compile(r"[^\w\n,/&]*(?:,|/|&|\bor\b|\band\b)[^\w\n]*(?:and\b|or\b)?[^\w\n]*" + LETTER.pattern)
STATED = re.compile(
    r"(?:(?<!wrong )(?<!other )\b(?:answer|choice|option)\b(?:[ \t]+is\b|[ \t*]*[:：])"
    r"|(?<!\bif )(?<!\bwhen )(?<!\bshould )(?<!\bsuppose )\bI(?:['’]d|['’]ll| would| will)? (?:choose|pick|go with)\b"
    r"(?! (?:to|this|that|it|these|those|them)\b)"
    r"|(?:答案|正确选项)(?:(?:应该?)?[是为為]|[ \t*]*[:：])(?:选项)?"
    r"|(?:所以|因此|综上|本题|答案|[故应])[，,]?(?:本题|答案)?应?选(?!项(?![（(]?[A-Z][）)]?是?正确)))"
    # what follows in the line up to a "but" or a question mark, or a letter that begins the next line
    r"((?:[ \t*_]*\n){1,2}[ \t*_(]*[A-Z](?:[*_).:][^\n]{0,200})?[ \t]*(?=\n|\Z)"
    r"|(?:(?!\b(?:but|however|wait|actually)\b(?! (?:if|not)\b)|\?)[^\n]){0,200})",
    re.IGNORECASE,
)
# A sentence that begins with "option B is correct" or "(B) is the best answer".
NAMED = re.compile(
    r"(?:^|[.!] )[ \t*_(]*(?:(?:so|thus|hence|therefore),? )?"
    r"(?:(?:option|choice|answer)[ \t*_(\"]*(?-i:([A-Z]))[*_)\"]* is (?:correct|right)"
    rf"|(?:option )?\(?(?-i:{LETTER.pattern})[*_).\"]* is the (?:only )?(?:correct|right|best) "
    r"(?:answer|choice|option))(?![-\w?]| (?:only|if|but|in|about|for)\b)",
    re.IGNORECASE,
)
# "is A rather than B": a capital A within a sentence is no article.
CAPITAL_A = re.compile(r"[ \t*_(\"']*A[*_)\"']* (?!(?:and|or)\b)[a-z]")
IN_STATEMENT = re.compile(LETTER.pattern.replace(r"\w", "A-Za-z0-9_"))  # beside Chinese characters, too
# What a box begins with that chooses a letter: "(B) 12", "B. 12", but not "H \ll E".
CHOICE = re.compile(rf"[\W_]*{LETTER.pattern}(?:[\W_]*$|[\s}}*]*[)\].:]|(?={ANOTHER.pattern}))")
ALONE = re.compile(r"[\W_]*([A-Za-z])[\W_]*")
MARKED = re.compile(r"(?<![\w'’])(?:\(([A-H])\)|([A-H])[.)])[*_]*(?=\s+\S)")  # "(B) 12", "B. 12", "**B)** 12"
# What speaks against a marked letter at the beginning of a line: "A) is tempting, so D".
CONCLUDED = re.compile(
    r"\b(?:so|thus|hence|therefore)\b[^\w\n]{0,9}"
    r"(?:(?:(?:the )?(?:right |correct |best )?(?:answer|choice|option)(?: is)?|I (?:choose|pick))[^\w\n]{0,9})?"
    rf"(?-i:{LETTER.pattern})(?! (?:is|are|was|does|has|cannot|fails)\b)(?!\()",
    re.IGNORECASE,
)
SMALL = re.compile(r"\s*\(?([a-z])(?:[.)]\s|[.)]?\s*$)")  # a response that is or begins with "b" or "b. 4"
ITEM = re.compile(r"(?m)^[ \t*]*\(?[a-z][.)]\s")  # of a list of options
FORMULA = re.compile(r"\\[A-Za-z]|[=<>+^_]|[A-Za-z]\(")


def qa_exact(prompt: Prompt, response: str) -> float:
    """1.0 where the final answer of `response` equals one of the `references` after `normalised`, else 0.0. A reference
    of which `normalised` leaves nothing ("A", "+") is compared in lower case as it is. Raises ValueError for a
    `prompt.answer` without references."""
    answer = final_answer(response)
    right = any(ours == right for ours, right in _compared(answer, references(prompt.answer)))
    return Graded(right, normalised(answer))


def qa_f1(prompt: Prompt, response: str) -> float:
    """The largest token F1 between the final answer and a reference; 1.0 where they are equal. Final answer, references
    and errors are as for `qa_exact`."""
    answer = final_answer(response)
    best = max(_f1(ours.split(), right.split()) for ours, right in _compared(answer, references(prompt.answer)))
    return Graded(best, normalised(answer))


def qa_sources(prompt: Prompt, response: str) -> float:
    """The F1 of the sources that `response` cites after its thinking, as "[2]" or "[1, report]", against the column
    `sources` of the row, both as sets; 1.0 where both are empty and there is an answer. Raises ValueError for a row
    whose `sources` is not a list of text and whole numbers."""
    right = prompt.meta.get("sources")
    if not isinstance(right, list) or not all(isinstance(each, str | int) for each in right):
        raise ValueError(f"the reward qa_sources needs the column sources, a list such as [1, 3], not {right!r:.200}")
    answer = after_thinking(response) or ""
    if not answer.strip():
        return 0.0  # also where the row has no sources
    cited = [name for group in CITATION.findall(answer) for name in group.split(",")]
    ours, theirs = (sorted({str(name).strip().lower() for name in names}) for names in (cited, right))
    return _f1(ours, theirs)


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
    found = [int(each) if isinstance(each, float) and each.is_integer() else each for each in found]
    texts = [str(each) for each in found if isinstance(each, str | int | float) and each == each and str(each).strip()]
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


# Multiple choice


def choice_answer(prompt: Prompt, response: str) -> float:
    """1.0 where the letter that `response` has `chosen` is `prompt.answer`, else 0.0. `prompt.answer` is a letter ("B",
    "(B)"), or the index of a letter, 0 for A. Raises ValueError for anything else."""
    letter = chosen(response)
    return Graded(letter == _right(prompt.answer), letter or "")


def chosen(response: str) -> str | None:
    r"""The letter in the last `<answer>` tag, else in an "answer is X" or "Answer: X" after the last `\boxed{}`, else
    in this box, else in the last "answer is X", else that of the only "B. 12" if it begins the last line, or of a
    sentence of this line that begins with "B is the best answer", if no "so C" follows it, else the last capital letter
    by itself. None where there is no letter, where one of these places has several, and where a box holds no choice and
    nothing states the answer. Only the text `after_thinking` is searched.
    """
    text = after_thinking(response)
    if text is None:
        return None
    if (inside := tagged(text)) is not None:
        return _letter(MARKUP.sub("", inside))
    box = boxed(text)
    if box is None:
        stated, letters = _stated(text), LETTER.findall(text)
        if not stated and len(ITEM.findall(text)) < 2 and (small := SMALL.match(text)):
            return small[1].upper()
        last = text.rstrip().rpartition("\n")[2].lstrip(" \t*_")
        marked = MARKED.match(last) if not stated and len(MARKED.findall(text)) == 1 else None
        if not (marked or stated) and (named := [*NAMED.finditer(last)]):
            if len({each[1] or each[2] for each in named}) > 1:
                return None
            marked = named[-1]
        if marked and not CONCLUDED.search(last, marked.end()):
            return marked[1] or marked[2]
        return _letter(stated) if stated else (letters[-1] if letters else None)
    content = MARKUP.sub("", box)
    if stated := _stated(text[max(text.rfind("\\boxed"), text.rfind("\\fbox")) :]):
        return _letter(stated)
    if ALONE.fullmatch(content) or CHOICE.match(content):
        return _letter(content)
    if stated := _stated(text):
        return _letter(stated)
    return None if FORMULA.search(content) else _letter(content)


def _stated(text: str) -> str:
    """What follows the last "answer is" that a letter follows; "" where there is none."""
    for found in reversed([*STATED.finditer(text)]):
        said = found[1]
        if CAPITAL_A.match(said) and not found[0].removesuffix(said).rstrip().endswith((":", "：")):
            return "A"
        letter = IN_STATEMENT.search(said)
        if ALONE.fullmatch(said) or (letter and not re.search(r"\bnot\b|n['’]t\b", said[: letter.start()])):
            alone = {*IN_STATEMENT.findall(said)}
            return alone.pop() if len(alone) == 1 else said
    return ""


def _letter(text: str) -> str | None:
    if alone := ALONE.fullmatch(text):
        return alone[1].upper()
    letter = LETTER.search(text)
    return None if letter is None or ANOTHER.match(text, letter.end()) else letter[1]


def _right(answer: Any) -> str:
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(string.ascii_uppercase):
        return string.ascii_uppercase[answer]
    bare = answer.strip(string.whitespace + string.punctuation) if isinstance(answer, str) else ""
    if not re.fullmatch("[A-Za-z]", bare):
        raise ValueError(f"the choice reward needs a letter as the answer, or its index from 0, not {answer!r:.200}")
    return bare.upper()
