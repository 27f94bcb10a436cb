"""The endless, resumable order of the prompts."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dynamo_megatron.config import DataConfig
from dynamo_megatron.data.sources import load_prompts
from dynamo_megatron.errors import InputError
from dynamo_megatron.types import Prompt

log = logging.getLogger(__name__)


def open_stream(
    config: DataConfig,
    encode: Callable[[Prompt], list[int]],
    max_prompt_length: int | None,
    before: Mapping[str, Any] | None = None,
    on_progress: Callable[[int], None] = lambda count: None,
    *,
    needs_answer: bool = False,
    conversations: bool = False,
) -> PromptStream:
    """The stream of `config.source`, continued from the state `before` (None: a new run). `on_progress` is called with
    the number of problems read so far; `needs_answer` and `conversations`: as for `load_prompts`.

    Raises ValueError as `load_prompts` and `PromptStream` do, and for a `before` of other data.
    """
    prompts = load_prompts(config, on_progress, needs_answer=needs_answer, conversations=conversations)
    stream = PromptStream(prompts, config, encode, max_prompt_length)
    if stream.skipped:
        share = f"{stream.skipped:,} of {len(prompts):,} prompts"
        log.warning("data.source: %s have more than %d tokens and are skipped", share, max_prompt_length)
    if stream.size < config.batch_prompts:
        log.warning("data.batch_prompts: %d is more than the %d problems", config.batch_prompts, stream.size)
    if before is not None:
        stream.load_state_dict(before)
    return stream


class PromptStream:
    """Prompts without end, in a new order each epoch.

    The order depends only on `config.shuffle_seed`, the epoch and the number of prompts. A batch may span two epochs,
    and may then have the same prompt twice. `encode` gives a prompt's tokens; it is called once for every prompt at the
    start, and again for each prompt that is drawn. A prompt of more than `max_prompt_length` tokens (None: any length)
    is skipped and counted (`skipped`). Raises ValueError where no prompt is short enough, and what `encode` raises.

    `size` is the number of prompts that can be drawn, `epoch` that of the prompt drawn last, from 0.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        config: DataConfig,
        encode: Callable[[Prompt], list[int]],
        max_prompt_length: int | None,
    ) -> None:
        self.prompts = prompts
        self._config, self._encode = config, encode
        # All are encoded here: a prompt that cannot be encoded would stop the run in the middle, and after each resume.
        lengths = [len(encode(prompt)) for prompt in prompts]
        limit = max(lengths) if max_prompt_length is None else max_prompt_length
        self._fitting = [index for index, length in enumerate(lengths) if length <= limit]
        self.size, self.skipped = len(self._fitting), len(prompts) - len(self._fitting)
        if not self.size:
            raise InputError(
                f"data.source: all {len(prompts)} prompts have more than {limit} tokens; raise model.max_length, or "
                "data.max_prompt_length if it is set"
            )
        self.epoch, self._taken = 0, 0  # prompts of the epoch
        self._order = self._shuffled()
        self._fingerprint = fingerprint(prompts, encode(prompts[0]))

    def next(self, n: int) -> list[Prompt]:
        """The next `n` prompts, as copies with `tokens` set."""
        return [self.encoded(prompt) for prompt in self.candidates(n)]

    def candidates(self, n: int) -> list[Prompt]:
        """The next `n` prompts, to be `encoded`."""
        return [self._draw() for _ in range(n)]

    def encoded(self, prompt: Prompt) -> Prompt:
        """A copy of one of the `candidates` with `tokens` set."""
        return dataclasses.replace(prompt, tokens=self._encode(prompt))

    def _draw(self) -> Prompt:
        if self._taken == self.size:
            self.epoch, self._taken = self.epoch + 1, 0
            self._order = self._shuffled()
        self._taken += 1
        return self.prompts[self._order[self._taken - 1]]

    def _shuffled(self) -> list[int]:
        # Python guarantees that an integer seed gives the same random() in all versions, but not the same shuffle().
        seed = hashlib.sha256(f"{self._config.shuffle_seed}/{self.epoch}".encode()).digest()
        generator = random.Random(int.from_bytes(seed, "big"))
        keys = [generator.random() for _ in self.prompts]
        return sorted(self._fitting, key=keys.__getitem__)

    def state_dict(self) -> dict[str, Any]:
        """Plain data of a fixed size: the stream's place, and the prompts' `fingerprint`."""
        return {"epoch": self.epoch, "taken": self._taken, "fingerprint": self._fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`. Raises ValueError where `state` belongs to other prompts."""
        if state["fingerprint"] != self._fingerprint:
            raise InputError(
                f"data.source: {self._config.source} has changed: the checkpoint's run has drawn from other problems "
                "(ids, order, problems, answers, other columns, or the tokens of the first one); resume with the same "
                "data, or start a new output_dir. A function has to yield the same items each time it is called: give "
                "its random numbers a seed"
            )
        self.epoch, self._taken = state["epoch"], state["taken"]
        self._order = self._shuffled()


def _text(value: Any) -> str:
    """Of any other object than Python's own the type alone: its text may be its address."""
    return str(value) if type(value).__module__ in ("datetime", "decimal") else type(value).__name__


def fingerprint(prompts: Sequence[Prompt], first: list[int]) -> str:
    """A hash of the ids, problems, answers and other columns in order, and of the first prompt's tokens: these show a
    change of tokenizer or template."""
    digest = hashlib.sha256(repr(first).encode())
    for p in prompts:
        columns = json.dumps(sorted(p.meta.items()), default=_text, skipkeys=True)
        plain = p.answer is None or isinstance(p.answer, str | int | float)
        answer = p.answer if plain else json.dumps(p.answer, default=_text, skipkeys=True)
        row = repr((p.prompt_id, p.messages, p.text, answer, columns))
        digest.update(row.encode("utf-8", "backslashreplace"))
    return digest.hexdigest()
