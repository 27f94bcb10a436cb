"""Maps spans of a response's text to its tokens."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

from dynamo_megatron.reward import Step

UNFINISHED = "\ufffd"  # what a part of a character decodes to
LONGEST = 4  # bytes of a character, and so at most as many tokens


def token_spans(
    steps: Sequence[Step], tokens: Sequence[int], text: str, decode: Callable[[Sequence[int]], str]
) -> list[tuple[int, int, float]]:
    """Returns (first token, end, reward) of each step; a step is (first character, end, reward). Ends are exclusive.
    Steps are in order and within `text`, which is `decode(tokens)`.

    A token that two steps share is in both. A step that ends with the text also has the tokens after it: the stop token
    has no text.
    """
    ends = character_ends(tokens, decode)

    def reached(characters: int) -> int:
        """Returns the index of the first token after which the text has at least so many characters."""
        return min(bisect.bisect_left(ends, characters), len(tokens) - 1)

    spans = []
    for start, end, reward in steps:
        first = reached(start)
        if start and ends[first] == start:  # else the token has the character at `start`, too
            first = min(first + 1, len(tokens) - 1)
        spans.append((first, len(tokens) if end == len(text) else reached(end) + 1, reward))
    return spans


def character_ends(tokens: Sequence[int], decode: Callable[[list[int]], str]) -> list[int]:
    """Returns, for each token, the number of characters of the text up to and including it. A character that several
    tokens make is counted at the last of them.

    What tokens add is the difference between decoding the last tokens that have text with them and without them, since
    most tokenizers decode a token depending on those before it (blanks, parts of characters).
    """
    ends: list[int] = []
    done = 0  # characters
    before: list[int] = []  # the last tokens that have text
    alone = 0  # characters of these without others
    character: list[int] = []  # the tokens after these, which may be part of a character
    for token in tokens:
        character.append(token)
        now = decode(before + character)
        if not now.endswith(UNFINISHED) or len(character) == LONGEST:  # whole, or bytes that are no text
            added = len(now) - alone
            done += added
            if added or not before:
                before, alone = character, len(decode(character))
            character = []
        ends.append(max([done, *ends[-1:]]))
    return ends
