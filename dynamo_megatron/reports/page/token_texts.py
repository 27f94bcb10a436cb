"""Decodes token ids one by one into pieces of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from dynamo_megatron.data.templates import load_tokenizer
from dynamo_megatron.errors import InputError

BROKEN = "\ufffd"  # what a decoder returns for bytes that are not a whole character
LONGEST = 3  # tokens of a character besides its last one: UTF-8 has at most four bytes per character
WINDOW = 16  # tokens without a whole character, after which those before the last LONGEST cannot become one

Decode = Callable[[Sequence[int]], str]


def find_decoder(folder: Path, model_path: str) -> Decode | None:
    """The decoder of the tokenizer in `model_path`, or else in the run's exported model; None where neither has a
    tokenizer that loads here."""
    for place in (Path(model_path), folder / "hf"):
        try:
            tokenizer = load_tokenizer(place)
        except InputError:
            continue
        return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return None


def token_texts(ids: Sequence[int], decode: Decode) -> list[str]:
    """One piece of text per token; joined they are the whole text. Where several tokens form a character, the last of
    them gets it and the others get "".

    The tokens are decoded in a sliding window, since decoders treat the first token of a text differently."""
    texts: list[str] = []
    start = done = 0  # the window's beginning; the number of tokens whose text is final
    for end in range(1, len(ids) + 1):
        before, now = decode(ids[start:done]), decode(ids[start:end])
        whole = len(now) > len(before) and not now.endswith(BROKEN)
        texts.append(now[len(before) :] if whole else "")
        if whole:
            start, done = done, end
        elif end - done == WINDOW:
            cuts = (c for c in range(end - LONGEST, done, -1) if now.startswith(decode(ids[start:c])))
            cut = next(cuts, end - LONGEST)  # not within a character
            texts[cut - 1] = decode(ids[start:cut])[len(before) :]
            start, done = done, cut
    if done < len(ids):  # bytes that never became a character
        texts[-1] = decode(ids[start:])[len(decode(ids[start:done])) :]
    return texts
