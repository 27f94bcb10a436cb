"""The problems of an evaluation, and which of them are also training prompts."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from dynamo_megatron.config import Config, EvalConfig
from dynamo_megatron.data.sources import load_prompts
from dynamo_megatron.errors import InputError
from dynamo_megatron.types import Prompt

log = logging.getLogger(__name__)

WORD = re.compile(r"\w+|[-+*/^=<>]")
LEAST = 8  # words of a problem that is also found in a longer prompt


def load_problems(
    config: Config, encode: Callable[[Prompt], list[int]], max_length: int, training: Iterable[Prompt] = ()
) -> list[Prompt]:
    """The problems of `read_problems`, `tokenized`. Logs `greedy_warnings`, and a warning about problems that are also
    in `training` (`overlap_warnings`), but keeps them. Raises ValueError as these functions do."""
    problems = tokenized(read_problems(config), encode, max_length)
    for warning in greedy_warnings(config.eval) + overlap_warnings(problems, training, config.data.source):
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
    """The first `eval.limit` problems of `eval.data` (else `data.source`). Raises ValueError."""
    source = config.eval.data or config.data.source
    of_training = config.data.limit if config.eval.data is None else None
    data = config.data.model_copy(update={"source": source, "limit": config.eval.limit or of_training})

    def of_eval(said: object) -> str:
        text = str(said).replace("data.source:", "eval.data:", 1).replace("data.limit", "eval.limit")
        return text if config.eval.data else str(said)

    try:
        return load_prompts(data, needs_answer=config.needs_answers, say=lambda line: log.warning(of_eval(line)))
    except ValueError as error:
        raise InputError(of_eval(error)) from None


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


def overlap_warnings(problems: Sequence[Prompt], training: Iterable[Prompt], source: str) -> list[str]:
    """A line where prompts in `training`, those of `source`, contain the words of some of `problems` in order and
    without gaps; else none. Problems of fewer than LEAST words must be equal to a whole prompt. System messages, case
    and punctuation do not count, except arithmetic signs."""
    texts, lengths = [_words(problem) for problem in problems], defaultdict[tuple[str, ...], set[int]](set)
    for words in texts:
        lengths[words[:LEAST]].add(len(words))
    wanted, known = set(texts), dict[tuple[str, ...], str]()  # words of a problem -> id of a prompt that contains them
    for prompt in training:
        words = _words(prompt)
        for start in range(max(1, len(words) - LEAST + 1)):
            for length in lengths.get(words[start : start + LEAST], ()):
                if (part := words[start : start + length]) in wanted:
                    known.setdefault(part, prompt.prompt_id)
    found = [(problem, known[words]) for problem, words in zip(problems, texts, strict=True) if words in known]
    if not found:
        return []
    return [
        f"eval.data: {len(found)} of {len(problems)} problems are in prompts of {source} too (the first, "
        f"{found[0][0].prompt_id!r}: in {found[0][1]!r}); their scores are of what was trained on"
    ]


def _words(prompt: Prompt) -> tuple[str, ...]:
    messages = prompt.messages or [{"role": "user", "content": prompt.text}]
    text = "\n".join(message["content"] for message in messages if message["role"] != "system")
    return tuple(WORD.findall(text.casefold()))
