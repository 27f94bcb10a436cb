"""Problems of an evaluation that training prompts contain, found by n-grams of words: pure functions."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dynamo_megatron.types import Prompt

LENGTH = 13  # words of an n-gram, as in arXiv 2005.14165
SHARE = 0.5  # of a problem's n-grams; competitions have sentences that many problems share
WORD = re.compile(r"\w+|[-+*/^=<>]")


class Overlap(NamedTuple):
    problem: Prompt  # of the evaluation
    share: float  # of its n-grams that one training prompt has, the highest of all
    training_id: str  # of this prompt


def overlaps(
    problems: Sequence[Prompt], training: Iterable[Prompt], *, length: int = LENGTH, share: float = SHARE
) -> list[Overlap]:
    """The problems of which one training prompt has at least `share` of the n-grams of `length` words, in their order.

    Words are in lower case, without punctuation other than signs of arithmetic; system messages do not count. A text of
    fewer words is one n-gram as a whole. What is held in memory are the n-grams of `problems`: `training` is read once.
    """
    numbers = [_ngrams(problem, length) for problem in problems]
    holders: dict[int, list[int]] = defaultdict(list)
    for position, ngrams in enumerate(numbers):
        for ngram in ngrams:
            holders[ngram].append(position)
    best = [(0.0, "")] * len(problems)
    for prompt in training:
        shared = Counter(i for ngram in _ngrams(prompt, length) if ngram in holders for i in holders[ngram])
        for i, count in shared.items():
            if count / len(numbers[i]) > best[i][0]:
                best[i] = count / len(numbers[i]), prompt.prompt_id
    return [Overlap(p, *found) for p, found in zip(problems, best, strict=True) if found[0] >= share]


def overlap_warning(name: str, problems: int, found: Sequence[Overlap], training: str) -> str:
    """One line on what `overlaps` has found in the `problems` problems of the evaluation `name` and the source
    `training`."""
    worst = max(found, key=lambda overlap: overlap.share)
    return (
        f"eval.data: {len(found)} of {problems} problems of {name} have at least {SHARE:.0%} of their {LENGTH}-grams "
        f"of words in one prompt of {training} (the most, {worst.share:.0%}: {worst.problem.prompt_id!r} in "
        f"{worst.training_id!r}); their scores are of what was trained on"
    )


def _ngrams(prompt: Prompt, length: int) -> set[int]:
    """Their hashes, of 64 bits: it takes billions of n-grams until two that differ are likely to have the same."""
    words = WORD.findall(problem_text(prompt).casefold())
    return {hash(tuple(words[i : i + length])) for i in range(max(1, len(words) - length + 1))}


def problem_text(prompt: Prompt) -> str:
    """What the user says: a system message is no part of the problem."""
    if prompt.messages is None:
        return prompt.text or ""
    return "\n".join(message["content"] for message in prompt.messages if message["role"] != "system")
