"""The problems of an evaluation."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable

from dynamo_megatron.config import Config
from dynamo_megatron.data.sources import load_prompts
from dynamo_megatron.errors import InputError
from dynamo_megatron.types import Prompt

log = logging.getLogger(__name__)

UNLIMITED = 10_000  # problems that a function may yield without eval.limit: it may be endless


def load_problems(
    config: Config, encode: Callable[[Prompt], list[int]], max_length: int, training: Iterable[Prompt] = ()
) -> list[Prompt]:
    """The first `eval.limit` problems of `eval.data` (else `data.source`), tokenized.

    A function that yields more than UNLIMITED problems is refused without a limit. Problems that are in `training` too
    are warned about, not left out. Raises ValueError naming a prompt of more than `max_length` tokens: a score that
    leaves problems out is another score.
    """
    source = config.eval.data or config.data.source
    try:
        prompts = _first_problems(config, source)
    except ValueError as error:
        raise InputError(str(error).replace("data.source:", "eval.data:", 1) if config.eval.data else error) from None
    tokenized = [dataclasses.replace(prompt, tokens=encode(prompt)) for prompt in prompts]
    for prompt in tokenized:
        if len(prompt.tokens) > max_length:
            raise InputError(
                f"eval.data: prompt {prompt.prompt_id!r} has {len(prompt.tokens)} tokens, above the limit of "
                f"{max_length}; raise model.max_length or lower eval.max_new_tokens"
            )
    known = {repr((p.messages, p.text)) for p in training}
    if seen := sum(repr((p.messages, p.text)) in known for p in tokenized):
        log.warning("eval.data: %d of %d problems of %s are trained on too", seen, len(tokenized), source)
    return tokenized


def _first_problems(config: Config, source: str) -> list[Prompt]:
    of_training = config.data.limit if config.eval.data is None else None
    data = config.data.model_copy(update={"source": source, "limit": config.eval.limit or of_training})
    if not data.streamed:
        return load_prompts(data)
    prompts = load_prompts(data.model_copy(update={"limit": UNLIMITED + 1}))
    if len(prompts) > UNLIMITED:
        raise InputError(f"eval.limit: {source} yields more than {UNLIMITED:,} problems; set how many are evaluated")
    return prompts
