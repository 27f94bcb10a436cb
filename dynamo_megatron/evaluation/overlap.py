"""Finds problems of an evaluation that training prompts contain, by n-grams of words: pure functions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from dynamo_megatron.types import Prompt

LENGTH = 13  # words of an n-gram, as in arXiv 2005.14165
SHORT = 5  # words; a problem of fewer is found only as a whole prompt, since any text may contain it
SHARE = 0.5  # of a problem's n-grams; less is no overlap, since problems of a competition share some sentences
COMMON = 0.03  # of the training prompts; an n-gram that more of them have belongs to an instruction
FEW, MOST = 10, 1000  # training prompts; an n-gram in FEW of them is never common, one in more than MOST always is
WORD = re.compile(r"\w+|[-+*/^=<>]")


class Overlap(NamedTuple):
    problem: Prompt  # of the evaluation
    share: float  # the share of its n-grams that the most similar training prompt has
    training_id: str  # prompt_id of this training prompt


def overlaps(
    problems: Sequence[Prompt], training: Iterable[Prompt], *, length: int = LENGTH, share: float = SHARE
) -> list[Overlap]:
    """The problems, in order, of whose n-grams of `length` words one training prompt has at least the share `share`.

    Words are compared in lower case and without punctuation, except arithmetic signs. System messages are ignored. A
    text of fewer than `length` words is a single n-gram; a problem of SHORT words or more is also found as a part of a
    longer training prompt. N-grams that more than COMMON of the training prompts have do
    not count, unless a problem has no others. `training` is read once. Only the n-grams of `problems` are held in
    memory, each with the positions of at most MOST + 1 training prompts.
    """
    texts = [_words(problem) for problem in problems]
    numbers = [set(_ngrams(words, length, _starts(words, length))) for words in texts]
    # Any 13 words in a row contain a whole block of their text (words 0 to 6, 7 to 13, ...). Few of these blocks are in
    # `problems`, so only the n-grams around them are hashed.
    block = (length + 1) // 2
    blocks = {number for words in texts for number in _ngrams(words, block, _starts(words, block))}
    short = _short(texts, length)
    places: dict[int, list[int]] = {ngram: [] for ngrams in numbers for ngram in ngrams}
    ids: dict[int, str] = {}
    place = 0
    for place, prompt in enumerate(training, 1):
        words = _words(prompt)
        every = _starts(words, length)
        at = range(0, len(words) - block + 1, block)
        known = (i for i, number in zip(at, _ngrams(words, block, at), strict=True) if number in blocks)
        around = {start for i in known for start in every[max(0, i + block - length) : i + 1]}
        found_here = set(_ngrams(words, length, every if len(words) < length else around))
        if short:
            for start, number in enumerate(_ngrams(words, SHORT, range(len(words) - SHORT + 1))):
                for size in short.get(number, ()):
                    found_here.update(_ngrams(words, size, [start]))
        for ngram in found_here:
            if ngram in places and len(places[ngram]) <= MOST:
                places[ngram].append(place)
                ids[place] = prompt.prompt_id
    most = min(MOST, max(FEW, COMMON * place))
    found = []
    for problem, ngrams in zip(problems, numbers, strict=True):
        own = {ngram for ngram in ngrams if len(places[ngram]) <= most} or ngrams
        shared = Counter(place for ngram in own for place in places[ngram])
        if shared:
            best = max(shared, key=lambda place: (shared[place], -place))
            if shared[best] / len(own) >= share:
                found.append(Overlap(problem, shared[best] / len(own), ids[best]))
    return found


def overlap_warning(name: str, problems: int, found: Sequence[Overlap], training: str) -> str:
    """A one-line warning about what `overlaps` found between the evaluation `name`, of `problems` problems, and the
    source `training`."""
    worst = max(found, key=lambda overlap: overlap.share)
    return (
        f"eval.data: {len(found)} of {problems} problems of {name} have at least {SHARE:.0%} of their {LENGTH}-grams "
        f"of words in one prompt of {training} (the most, {worst.share:.0%}: {worst.problem.prompt_id!r} in "
        f"{worst.training_id!r}); their scores are of what was trained on"
    )


def _short(texts: Sequence[Sequence[str]], length: int) -> dict[int, set[int]]:
    """Of the texts of at least SHORT and fewer than `length` words: hash of the first SHORT words -> lengths."""
    sizes: dict[int, set[int]] = {}
    for words in texts:
        if SHORT <= len(words) < length:
            sizes.setdefault(hash(tuple(words[:SHORT])), set()).add(len(words))
    return sizes


def _words(prompt: Prompt) -> list[str]:
    return WORD.findall(problem_text(prompt).casefold())


def _starts(words: Sequence[str], length: int) -> range:
    """The positions where n-grams begin; a text of fewer words is one n-gram."""
    return range(max(1, len(words) - length + 1))


def _ngrams(words: Sequence[str], length: int, starts: Iterable[int]) -> Iterator[int]:
    """The n-grams' hashes. These have 64 bits, so a collision becomes likely only with billions of n-grams."""
    return (hash(tuple(words[i : i + length])) for i in starts)


def problem_text(prompt: Prompt) -> str:
    """The text of all messages but system messages, which are no part of the problem."""
    if prompt.messages is None:
        return prompt.text or ""
    return "\n".join(message["content"] for message in prompt.messages if message["role"] != "system")
