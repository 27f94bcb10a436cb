"""Finding the final answer in a response."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:(?:(?<!\d,)\d{1,3}(?:,\d{3})+(?!,?\d)|\d+)(?:\.\d+)?(?:/\d+|[eE][-+]?\d+)?|\.\d+)"
)
THINK = r"(?:think(?:ing)?|thought|reasoning)"
FINAL = re.compile(rf"</{THINK}>|\[/THINK\]|<\|channel\|>final(?: [^<]{{0,50}})?<\|message\|>|◁/think▷|</seed:think>")
THINKING = re.compile(rf"<{THINK}>|\[THINK\]|<\|channel\|>analysis|◁think▷|<seed:think>")
OPENED = re.compile(rf"(?:{THINKING.pattern})\s*\Z")
MARKER = re.compile(rf"<\|(?:channel|message)\|>|{THINKING.pattern}|{FINAL.pattern}")
BOX = re.compile(r"\\(?P<kind>boxed|fbox)(?![A-Za-z])\s*\{?|\\[{}\\]|[{}]")
GROUP = r"\{[^{}]{0,1000}\}"
UNBRACED = re.compile(
    rf"\s*(?:\\[dt]?frac\s*(?:{GROUP}|\d)\s*(?:{GROUP}|\d)|\\sqrt\s*(?:{GROUP}|\d+)|-?\d+(?:\.\d+)?"
    rf"|\\[A-Za-z]+(?:\s*{GROUP})?|[A-Za-z])"
)
SIGN = re.compile(r"(?:^|[=(:$]|\bis)(?:[ \t]*[-−][ \t]*|\s*[-−])\Z")  # "- " in a new line begins an item
LEFT = re.compile(r"(?<![A-Za-z\\])([A-Za-z])(?:_\{?\d\}?)?\s*=\s*(?:\\?[$(\[]\s*)?\Z")
FURTHER = re.compile(r"\n|\b(?:so|then|thus|hence|therefore)\b")
OR, AND = re.compile(r"\bor\b|或"), re.compile(r"[\s$,*]*and[\s$*-]*")  # between boxes
FACTOR_BEFORE = re.compile(r"(?:\d|[/^][ \t]*|(?<![*\s])\*[ \t]*|\\(?:cdot|times)\s*|\bnot\s+[$(\\\[]*\s*)\Z")
FACTOR_AFTER = re.compile(
    r"\^(?![ \t]{0,3}\{?[ \t]{0,3}\\circ)|\d|\.\d|[ \t]*(?:/|\*|\\times|\\cdot)[ \t]*\d"
    r"|\$?\s(?:is|was) (?:not|wrong|incorrect)\b"
)
SENTENCE_END = re.compile(r"(?<!\\)[.!?](?:\s|$)|[。！？]|\n\s*\n")
FENCE = re.compile(r"^([ \t]*)(`{3,}|~{3,})([^\n`]*)$", re.MULTILINE)
ANSWER_IS = re.compile(r"^(?:####|.*(?:\banswer\b(?:\s+is\b)?|答案[是为為]?))[\s:：]*", re.IGNORECASE)
IS_ANSWER = re.compile(
    r"(?<![\s,;])[\s,;]{1,20}(?:(?:and|that|this|which)\s+){0,3}(?:is|was)\s+(?:the|my|our)\s(?:\w{1,20}\s){0,3}answer\b.*",
    re.IGNORECASE,
)
MARKUP = re.compile(r"\\(?:text|math|bold)[a-z]*\b")
LONGEST = 200  # characters of an answer that is kept as it is


class Graded(float):
    """A score of a response with the `answer` that a reward read in it, "" if it found none, and the
    SHA-256 of one longer than LONGEST."""

    def __new__(cls, score: float, answer: str) -> Graded:
        graded = super().__new__(cls, score)
        long = len(answer) > LONGEST
        graded.answer = hashlib.sha256(answer.encode(errors="replace")).hexdigest() if long else answer
        return graded


def after_thinking(text: str) -> str | None:
    """The text after the last `</think>` or the last marker of a final channel; all of it where there is no thinking.
    None where a `<think>` is not finished."""
    rest = text[max((found.end() for found in FINAL.finditer(text)), default=0) :]
    return None if THINKING.search(rest) else rest


def opened_thinking(prompt: str) -> str:
    """The marker of thinking that a rendered prompt ends with, as DeepSeek-R1's do, and the white space after it; ""
    where it ends with none."""
    found = OPENED.search(prompt)
    return found[0] if found else ""


def response_decoder(tokenizer: Tokenizer) -> Callable[[Sequence[int]], str]:
    """Decodes responses without special tokens, except those that mark thinking: without gpt-oss's `<|channel|>` or
    Mistral's `[THINK]` a reward function could not tell the thinking from the answer."""
    added = getattr(tokenizer, "added_tokens_decoder", None) or tokenizer.get_added_tokens_decoder()
    special = {number: token.content for number, token in added.items() if token.special}
    dropped = {number for number, text in special.items() if not MARKER.fullmatch(text)}
    if len(dropped) == len(special):
        return functools.partial(tokenizer.decode, skip_special_tokens=True)
    return lambda tokens: tokenizer.decode([t for t in tokens if t not in dropped], skip_special_tokens=False)


def boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}` of `text` that is not empty; else of the last `\fbox{...}`.
    Braces may be missing: `\boxed 2`, `\boxed\frac12`."""
    found = boxes(text)
    return found[-1][2] if found else None


def boxes(text: str) -> list[tuple[int, int, str]]:
    r"""(start, end, content) of all complete boxes that are not empty and hold no other box, in their order."""
    # One pass, since a response that repeats itself may hold thousands of boxes that are never closed.
    open_braces: list[re.Match | None] = []
    found: dict[str, list[tuple[int, int, str]]] = {"boxed": [], "fbox": []}
    for match in BOX.finditer(text):
        if match[0] == "}" and open_braces:
            start = open_braces.pop()
            if start is not None and (content := text[start.end() : match.start()].strip()):
                of_kind = found[start["kind"]]
                if not (of_kind and of_kind[-1][0] > start.start()):  # else a box in this one was found
                    of_kind.append((start.start(), match.end(), content))
        elif match["kind"] and match[0].endswith("{"):
            open_braces.append(match)
        elif match["kind"] and (bare := UNBRACED.match(text, match.end())):
            found[match["kind"]].append((match.start(), bare.end(), bare[0].strip()))
        elif match[0] == "{":
            open_braces.append(None)
    return found["boxed"] or found["fbox"]


def last_boxes(text: str) -> list[str]:
    r"""The content of the last box, before it that of all boxes of its sentence as a list. Only the list where "or"
    stands between them, or nothing but "and" before the last. A sign before a box belongs to it: "x = -\boxed{5}"."""
    found = boxes(text)
    if found and (FACTOR_BEFORE.search(text[: found[-1][0]][-20:]) or FACTOR_AFTER.match(text, found[-1][1])):
        return []  # 3\boxed{7}, \boxed{7}^2, not \boxed{7}
    contents: list[str] = []
    either, lefts = False, []  # lefts: of "x = ", before each box
    for k in reversed(range(len(found))):
        start, _, content = found[k]
        sign = "-" if SIGN.search(text[max(0, start - 20) : start]) else ""
        contents.insert(0, sign + content)
        lefts.append((LEFT.search(text[max(0, start - 20) : start]) or [None, None])[1])
        between = text[found[k - 1][1] : start]
        if k == 0 or SENTENCE_END.search(between):
            break
        last_two = k == len(found) - 1 and content != found[k - 1][2] and "=" not in content
        either = either or bool(OR.search(between) or (last_two and AND.fullmatch(between)))
    if None not in lefts[:1] and set(lefts[:1]) & set(lefts[1:]) and len(set(contents)) > 1:  # x = 2 and x = -3
        either = either or not FURTHER.search(text[found[-2][1] : found[-1][0]])
    return [", ".join(contents), *([] if either else contents[-1:])] if len(contents) > 1 else contents


def tagged(text: str) -> str | None:
    """The content of the last `<answer>...</answer>` of `text`; None where there is none."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return text[start + len("<answer>") : end].strip() if start >= 0 else None


def last_line(text: str) -> str:
    """The last non-empty line, without "the answer is" and anything before it, or "is the answer" and anything after
    it; "" where there is no such line."""
    line = (text.strip().splitlines() or [""])[-1]
    after = ANSWER_IS.sub("", line)
    stated = None if any(map(str.isalnum, after)) else IS_ANSWER.search(line)
    return after if stated is None else line[: stated.start()]


def final_answer(text: str) -> str:
    r"""The content of the last `<answer>` tag, or of the last `\boxed{}` in it; else of the last `\boxed{}`, else the
    `last_line`. Only the text `after_thinking` is searched; "" where there is none."""
    found = after_thinking(text) or ""
    inside = tagged(found)
    box = boxed(found if inside is None else inside)
    if box is not None:
        return MARKUP.sub("", box)
    return last_line(found) if inside is None else inside


def fenced(text: str, languages: Collection[str]) -> str | None:
    """The content of the last complete fenced block marked as one of `languages`, else of the last unmarked block.
    The indentation of the block's fence is removed (CommonMark). None where there is no such block."""
    found: dict[bool, str] = {}  # marked? -> block
    opening: re.Match | None = None
    for fence in FENCE.finditer(text):
        if opening is None:
            opening = fence
        elif fence[2].startswith(opening[2]) and not fence[3].strip():
            language = opening[3].strip().lower().partition(" ")[0]
            if not language or language in languages:
                indented = re.compile(rf"^[ \t]{{1,{len(opening[1])}}}", re.MULTILINE) if opening[1] else None
                block = text[opening.end() + 1 : fence.start()]
                found[bool(language)] = indented.sub("", block) if indented else block
            opening = None
    return found.get(True, found.get(False))


def last_number(text: str) -> str | None:
    """The last number of `text` without thousands separators; a/b and 1.5e-3 count as one number. None: no number."""
    numbers = NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else None
