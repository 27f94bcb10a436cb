"""The endless, resumable order of the prompts."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dynamo_megatron.config import DataConfig
from dynamo_megatron.data.iterator_stream import IteratorStream
from dynamo_megatron.data.limits import too_long
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
) -> PromptStream | IteratorStream:
    """The stream of `config.source`, continued from the state `before` (None: a new run). `on_progress` is called with
    the number of problems read so far; `needs_answer`: as for `load_prompts`.

    Raises ValueError as `load_prompts`, `PromptStream` and `IteratorStream` do, and for a `before` of other data.
    """
    stream: PromptStream | IteratorStream
    if config.streamed:
        log.warning("data.source: %s is read as the run goes on, in its order (see data.limit)", config.source)
        stream = IteratorStream(config, encode, max_prompt_length, needs_answer=needs_answer)
    else:
        prompts = load_prompts(config, on_progress, needs_answer=needs_answer)
        stream = PromptStream(prompts, config, encode, max_prompt_length)
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
    is skipped and counted (`skipped`), or raises an error in the constructor (`config.on_long_prompt`). Raises
    ValueError where no prompt is short enough, and what `encode` raises.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        config: DataConfig,
        encode: Callable[[Prompt], list[int]],
        max_prompt_length: int | None,
    ) -> None:
        self.prompts = prompts
        self.epoch = 0  # of the prompt drawn last
        self._config, self._encode = config, encode
        # All are encoded here: a prompt that cannot be encoded would stop the run in the middle, and after each resume.
        self._too_long = {
            index for index, prompt in enumerate(prompts) if too_long(prompt, encode(prompt), max_prompt_length, config)
        }
        self.skipped = len(self._too_long)
        self.size = len(prompts) - self.skipped  # prompts that can be drawn
        if not self.size:
            raise InputError(
                f"data.max_prompt_length: all {len(prompts)} prompts have more than {max_prompt_length} tokens"
            )
        self._position, self._order = 0, self._shuffled()
        self._fingerprint = _fingerprint(prompts, encode(prompts[0]))

    def next(self, n: int, on_poll: Callable[[], None] | None = None) -> list[Prompt]:
        """The next `n` prompts, as copies with `tokens` set. Nothing is waited for, so `on_poll` is not called."""
        return [self.encoded(prompt) for prompt in self.candidates(n, on_poll)]

    def candidates(self, n: int, on_poll: Callable[[], None] | None = None) -> list[Prompt]:
        """The next `n` prompts, without their tokens."""
        batch: list[Prompt] = []
        while len(batch) < n:
            if self._position == self.size:
                self.epoch, self._position = self.epoch + 1, 0
                self._order = self._shuffled()
            batch.append(self.prompts[self._order[self._position]])
            self._position += 1
        return batch

    def encoded(self, prompt: Prompt) -> Prompt:
        """A copy of one of the `candidates` with `tokens` set."""
        return dataclasses.replace(prompt, tokens=self._encode(prompt))

    def _shuffled(self) -> list[int]:
        # Python guarantees that an integer seed gives the same random() in all versions, but not the same shuffle().
        seed = hashlib.sha256(f"{self._config.shuffle_seed}/{self.epoch}".encode()).digest()
        generator = random.Random(int.from_bytes(seed, "big"))
        keys = [generator.random() for _ in self.prompts]
        return sorted(set(range(len(keys))) - self._too_long, key=keys.__getitem__)

    def state_dict(self) -> dict[str, Any]:
        """Plain data: the stream's position, and a fingerprint of the prompts (`_fingerprint`)."""
        return {
            "epoch": self.epoch,
            "position": self._position,
            "shuffle_seed": self._config.shuffle_seed,
            "fingerprint": self._fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state`. Raises ValueError where `state` belongs to other prompts or another seed."""
        if state["fingerprint"] != self._fingerprint:
            raise InputError(
                f"data.source: {self._config.source} has changed: the checkpoint's run has drawn from other problems "
                "(ids, order, problems, answers, or the tokens of the first one); resume with the same data, or start "
                "a new output_dir"
            )
        if state["shuffle_seed"] != self._config.shuffle_seed:
            raise InputError(
                f"data.shuffle_seed: {self._config.shuffle_seed} is not the checkpoint's {state['shuffle_seed']}; "
                "resume with that one, or start a new output_dir"
            )
        self.epoch, self._position = state["epoch"], state["position"]
        self._order = self._shuffled()


def _fingerprint(prompts: Sequence[Prompt], first: list[int]) -> str:
    """A hash of the ids, problems and answers in order, and of the first prompt's tokens: these show a change of
    tokenizer or template."""
    digest = hashlib.sha256(repr(first).encode())
    for p in prompts:
        digest.update(repr((p.prompt_id, p.messages, p.text, p.answer)).encode("utf-8", "backslashreplace"))
    return digest.hexdigest()
