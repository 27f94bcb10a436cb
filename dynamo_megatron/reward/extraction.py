"""Finding the final answer in a response."""

from __future__ import annotations

import re

NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?![\d,]*\d)|\d+)(?:\.\d+)?(?:/\d+)?|(?<!\w)[-+]?\.\d+")
THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:,|\{,\}|,\\!|\\,)\d{3})+(?!\d|,\d)")
SEPARATOR = re.compile(r"\{,\}|,\\!|\\,|,")


def boxed(text: str) -> str | None:
    r"""What stands in the last complete `\boxed{...}` (or `\fbox{...}`) of `text`; None where there is none."""
    for start in reversed([match.end() for match in re.finditer(r"\\f?boxed\s*\{", text)]):
        depth = 1
        for end in range(start, len(text)):
            if text[end] in "{}" and text[end - 1] != "\\":
                depth += 1 if text[end] == "{" else -1
            if depth == 0:
                return text[start:end].strip()
    return None


def tagged(text: str) -> str | None:
    """What stands in the last `<answer>...</answer>` of `text`; None where there is none."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return text[start + len("<answer>") : end].strip() if start >= 0 else None


def join_thousands(text: str) -> str:
    """Removes thousands separators ("1,000", "1{,}000"), but not next to brackets, where a comma may part numbers."""
    if any(bracket in text for bracket in ("(", "[", "\\{")):
        return text
    return THOUSANDS.sub(lambda match: SEPARATOR.sub("", match[0]), text)


def last_number(text: str) -> str | None:
    """The last number of `text` (a fraction a/b counts as one) without thousands separators; None without any."""
    numbers = [match[0] for match in NUMBER.finditer(text)]
    return numbers[-1].replace(",", "") if numbers else None
