"""The problems of an evaluation, and which of them training prompts contain, by n-grams of words."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dynamo_megatron.config import Config, EvalConfig
from dynamo_megatron.data.sources import DATASETS, load_prompts, located_prompts
from dynamo_megatron.errors import InputError
from dynamo_megatron.types import Prompt

log = logging.getLogger(__name__)

LENGTH = 13  # words of an n-gram, as in arXiv 2005.14165
SHORT = 5  # words; a problem of fewer is found only as a whole prompt, since any text may contain it
SHARE = 0.5  # of a problem's n-grams; less is no overlap, since problems of a competition share some sentences
COMMON = 0.03  # of the training prompts; an n-gram that more of them have belongs to an instruction
FEW, MOST = 10, 1000  # training prompts; an n-gram in FEW of them is never common, one in more than MOST always is
WORD = re.compile(r"\w+|[-+*/^=<>]")
UNLIMITED = 10_000  # problems that a function may yield without eval.limit; more are an error: it may be endless


def load_problems(
    config: Config, encode: Callable[[Prompt], list[int]], max_length: int, training: Iterable[Prompt] = ()
) -> list[Prompt]:
    """The problems of `read_problems`, `tokenized`. Logs `greedy_warnings`, and a warning about problems that are also
    in `training` (`overlaps`), but keeps them. Raises ValueError as these functions do."""
    problems = tokenized(read_problems(config), encode, max_length)
    sets = {config.eval.data or config.data.source: problems}
    for warning in greedy_warnings(config.eval) + overlap_warnings(sets, training, config.data.source):
        log.warning("%s", warning)
    return problems


def greedy_warnings(config: EvalConfig) -> list[str]:
    if config.temperature != 0 or config.samples == 1:
        return []
    return [
        f"eval.temperature=0 is greedy: the {config.samples} samples of a problem (eval.samples) are one response, "
        "and pass@k of several says no more than pass@1; set eval.samples=1 eval.k=[1], or a temperature above 0"
    ]


def read_problems(config: Config) -> list[Prompt]:
    """The first `eval.limit` problems of `eval.data` (else `data.source`).

    Raises ValueError, also for a function that yields more than UNLIMITED problems without a limit.
    """
    source = config.eval.data or config.data.source
    of_training = config.data.limit if config.eval.data is None else None
    data = config.data.model_copy(update={"source": source, "limit": config.eval.limit or of_training})
    if streamed := data.streamed:
        data = data.model_copy(update={"limit": UNLIMITED + 1})
    try:
        prompts = load_prompts(data, needs_answer=config.needs_answers)
    except ValueError as error:
        raise InputError(str(error).replace("data.source:", "eval.data:", 1) if config.eval.data else error) from None
    if streamed and len(prompts) > UNLIMITED:
        raise InputError(f"eval.limit: {source} yields more than {UNLIMITED:,} problems; set how many are evaluated")
    return prompts


def tokenized(prompts: Sequence[Prompt], encode: Callable[[Prompt], list[int]], max_length: int) -> list[Prompt]:
    """Copies of `prompts` with `tokens` set. Raises ValueError naming a prompt of more than `max_length` tokens:
    without this problem the scores could not be compared."""
    problems = [dataclasses.replace(prompt, tokens=encode(prompt)) for prompt in prompts]
    for prompt in problems:
        if len(prompt.tokens) > max_length:
            raise InputError(
                f"eval.data: prompt {prompt.prompt_id!r} has {len(prompt.tokens)} tokens, above the limit of "
                f"{max_length}; raise model.max_length or lower eval.max_new_tokens"
            )
    return problems


def is_local(source: str) -> bool:
    """Returns True where `source` is a file, or a folder of the `datasets` library: finite, and needs no network."""
    if source.startswith(DATASETS):
        return Path(source.removeprefix(DATASETS).partition("?")[0]).is_dir()
    return source.endswith((".jsonl", ".parquet"))


def training_prompts(config: Config) -> Iterator[Prompt]:
    """Yields the prompts of `data.source`, or of its first `data.limit` rows. Raises ValueError as `load_prompts`."""
    rows = (prompt for _, prompt in located_prompts(config.data) if isinstance(prompt, Prompt))
    return itertools.islice(rows, config.data.limit)


# Problems that training prompts contain


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


def overlap_warnings(sets: Mapping[str, Sequence[Prompt]], training: Iterable[Prompt], source: str) -> list[str]:
    """A line for each of the evaluation's `sets` (name -> problems) of which `overlaps` finds problems in `training`,
    the prompts of `source`."""
    found, warnings = overlaps([problem for problems in sets.values() for problem in problems], training), []
    for name, problems in sets.items():
        ours = {id(problem) for problem in problems}
        if own := [overlap for overlap in found if id(overlap.problem) in ours]:
            worst = max(own, key=lambda overlap: overlap.share)
            warnings.append(
                f"eval.data: {len(own)} of {len(problems)} problems of {name} have at least {SHARE:.0%} of their "
                f"{LENGTH}-grams of words in one prompt of {source} (the most, {worst.share:.0%}: "
                f"{worst.problem.prompt_id!r} in {worst.training_id!r}); their scores are of what was trained on"
            )
    return warnings


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
