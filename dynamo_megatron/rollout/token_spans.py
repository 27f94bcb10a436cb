"""From characters of a response's text to its tokens."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dynamo_megatron.reward import Step

if TYPE_CHECKING:
    from tokenizers import Tokenizer

UNFINISHED = "\ufffd"  # what a part of a character decodes to
LONGEST = 4  # bytes of a character, and so its tokens


def token_spans(
    steps: Sequence[Step], tokens: Sequence[int], text: str, tokenizer: Tokenizer
) -> list[tuple[int, int, float]]:
    """(first token, end, reward) of each step, which is (first character, end, reward) in order and within `text`.

    A token that two steps share is in both. A step that ends with the text has the tokens after it, too: the stop token
    has no text.
    """
    ends = character_ends(tokens, tokenizer)

    def reached(characters: int) -> int:
        """The token with which the text has that many."""
        return min(bisect.bisect_left(ends, characters), len(tokens) - 1)

    spans = []
    for start, end, reward in steps:
        first = reached(start)
        if start and ends[first] == start:  # else it has the character at `start`, too
            first = min(first + 1, len(tokens) - 1)
        spans.append((first, len(tokens) if end == len(text) else reached(end) + 1, reward))
    return spans


def character_ends(tokens: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Characters of the text up to and with each token, special tokens left out. A character that several tokens make
    comes with the last one.

    What tokens add is the text of the last ones that have any, with and without them, since most tokenizers decode a
    token by those before it (blanks, parts of characters).
    """
    alone: dict[int, int] = {}  # characters of a token without others

    def characters(group: list[int]) -> int:
        if len(group) != 1:
            return len(tokenizer.decode(group, skip_special_tokens=True))
        if group[0] not in alone:
            alone[group[0]] = len(tokenizer.decode(group, skip_special_tokens=True))
        return alone[group[0]]

    ends: list[int] = []
    done = 0  # characters
    before: list[int] = []  # the last tokens that have text
    character: list[int] = []  # those after it, which may be a part of one
    for token in tokens:
        character.append(token)
        now = tokenizer.decode(before + character, skip_special_tokens=True)
        if not now.endswith(UNFINISHED) or len(character) == LONGEST:  # no part of one: bytes that are no text
            added = len(now) - characters(before)
            done += added
            if added or not before:
                before = character
            character = []
        ends.append(max([done, *ends[-1:]]))
    return ends
