"""Finds problems of an evaluation that training prompts contain, by n-grams of words: pure functions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
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
    numbers = [_ngrams(words, min(length, len(words))) for words in texts]
    short: dict[int, set[int]] = {}  # hash of the first SHORT words -> lengths of the problems that begin with them
    for words in texts:
        if SHORT <= len(words) < length:
            short.setdefault(hash(tuple(words[:SHORT])), set()).add(len(words))
    places: dict[int, list[int]] = {ngram: [] for ngrams in numbers for ngram in ngrams}
    ids: dict[int, str] = {}
    place = 0
    for place, prompt in enumerate(training, 1):
        words = _words(prompt)
        found_here = _ngrams(words, min(length, len(words)))
        for start in range(len(words) - SHORT + 1) if short else ():
            for size in short.get(hash(tuple(words[start : start + SHORT])), ()):
                found_here.add(hash(tuple(words[start : start + size])))
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


def _words(prompt: Prompt) -> list[str]:
    return WORD.findall(problem_text(prompt).casefold())


def _ngrams(words: Sequence[str], length: int) -> set[int]:
    """The n-grams' hashes. These have 64 bits, so a collision becomes likely only with billions of n-grams."""
    return {hash(tuple(words[i : i + length])) for i in range(len(words) - length + 1)}


def problem_text(prompt: Prompt) -> str:
    """The text of all messages but system messages, which are no part of the problem."""
    if prompt.messages is None:
        return prompt.text or ""
    return "\n".join(message["content"] for message in prompt.messages if message["role"] != "system")
