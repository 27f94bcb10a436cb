"""Token ids as the pieces of text that they stand for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from dynamo_megatron.data.templates import load_tokenizer
from dynamo_megatron.errors import InputError

BROKEN = "\ufffd"  # what a decoder gives for bytes that are no whole character
LONGEST = 3  # tokens of a character but its last one: UTF-8 has at most four bytes a character
WINDOW = 16  # tokens without a whole character, after which those before the last LONGEST never become one

Decode = Callable[[Sequence[int]], str]


def find_decoder(folder: Path, model_path: str) -> Decode | None:
    """Of the tokenizer in `model_path`, or in the run's exported model; None: neither has one that loads here."""
    for place in (Path(model_path), folder / "hf"):
        try:
            tokenizer = load_tokenizer(place)
        except InputError:
            continue
        return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return None


def token_texts(ids: Sequence[int], decode: Decode) -> list[str]:
    """One piece a token; joined they are the text of all. A character that several tokens make stands at the last of
    them, the others get "".

    Decoded in a sliding window, since decoders treat the first token of a text differently."""
    texts: list[str] = []
    start = done = 0  # of the window; what has been given to tokens
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
