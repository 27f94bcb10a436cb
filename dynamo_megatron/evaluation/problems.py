"""The problems of an evaluation."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from dynamo_megatron.config import Config, EvalConfig
from dynamo_megatron.data.sources import DATASETS, load_prompts, located_prompts
from dynamo_megatron.errors import InputError
from dynamo_megatron.evaluation.overlap import overlap_warning, overlaps
from dynamo_megatron.types import Prompt

log = logging.getLogger(__name__)

UNLIMITED = 10_000  # problems that a function may yield without eval.limit; more are an error: it may be endless


def load_problems(
    config: Config, encode: Callable[[Prompt], list[int]], max_length: int, training: Iterable[Prompt] = ()
) -> list[Prompt]:
    """The problems of `read_problems`, `tokenized`. Logs `greedy_warnings`, and a warning about problems that are also
    in `training` (`overlaps`), but keeps them. Raises ValueError as these functions do."""
    for warning in greedy_warnings(config.eval):
        log.warning("%s", warning)
    problems = tokenized(read_problems(config), encode, max_length)
    if found := overlaps(problems, training):
        evaluated = config.eval.data or config.data.source
        log.warning("%s", overlap_warning(evaluated, len(problems), found, config.data.source))
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
    try:
        return _first_problems(config, source)
    except ValueError as error:
        raise InputError(str(error).replace("data.source:", "eval.data:", 1) if config.eval.data else error) from None


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


def _first_problems(config: Config, source: str) -> list[Prompt]:
    of_training = config.data.limit if config.eval.data is None else None
    data = config.data.model_copy(update={"source": source, "limit": config.eval.limit or of_training})
    if not data.streamed:
        return load_prompts(data, needs_answer=config.needs_answers)
    prompts = load_prompts(data.model_copy(update={"limit": UNLIMITED + 1}), needs_answer=config.needs_answers)
    if len(prompts) > UNLIMITED:
        raise InputError(f"eval.limit: {source} yields more than {UNLIMITED:,} problems; set how many are evaluated")
    return prompts
