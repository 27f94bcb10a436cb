"""Texts of others (models, users' code, data) as a terminal may show them."""

from __future__ import annotations

import re
import unicodedata

TERMINAL_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")  # colours, cursor
BIDI_CONTROLS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


def on_one_line(text: str, longest: int | None = None) -> str:
    """For messages: one line of at most `longest` characters (None: any number). Blanks stand for what is not
    printable."""
    plain = TERMINAL_SEQUENCE.sub(" ", text)
    line = " ".join("".join(c if c.isprintable() else " " for c in plain).split())
    return line if longest is None or len(line) <= longest else f"{line[:longest]}..."


def printable(text: str) -> str:
    """`text` with what could drive a terminal written as an escape: control characters but newline and tab, line
    separators, halves of surrogate pairs, and what turns the direction of writing."""
    return "".join(c if c.isprintable() or c in "\n\t" or not _drives(c) else _escape(c) for c in text)


def _drives(c: str) -> bool:
    return unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or unicodedata.bidirectional(c) in BIDI_CONTROLS


def _escape(c: str) -> str:
    return c.encode("unicode_escape", "surrogatepass").decode()
