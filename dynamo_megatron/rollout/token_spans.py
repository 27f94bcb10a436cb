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

    What a token adds is the text of a few tokens with and without it, since most tokenizers decode a token by those
    before it (blanks, parts of characters).
    """

    def decoded(start: int, end: int) -> str:
        return tokenizer.decode(tokens[start:end], skip_special_tokens=True)

    ends: list[int] = []
    done = start = read = 0  # characters; tokens [start, read) are the ones before
    for end in range(1, len(tokens) + 1):
        now = decoded(start, end)
        if not now.endswith(UNFINISHED) or end - read == LONGEST:  # no part of one: bytes that are no text
            done += len(now) - len(decoded(start, read))
            start, read = read, end
        ends.append(max([done, *ends[-1:]]))
    return ends
