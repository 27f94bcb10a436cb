"""The endless, resumable order of the prompts."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import queue
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

from dynamo_megatron.config import DataConfig
from dynamo_megatron.data.sources import content_digest, id_taken, load_prompts, located_prompts
from dynamo_megatron.errors import InputError
from dynamo_megatron.types import Prompt

log = logging.getLogger(__name__)

POLL_EVERY = 0.1  # seconds
SKIPPED_IN_A_ROW = 10_000  # skipped items in a row are an error: an endless iterator may have no others


def open_stream(
    config: DataConfig,
    encode: Callable[[Prompt], list[int]],
    max_prompt_length: int | None,
    before: Mapping[str, Any] | None = None,
    on_progress: Callable[[int], None] = lambda count: None,
    *,
    needs_answer: bool = False,
) -> PromptStream:
    """The stream of `config.source`, continued from the state `before` (None: a new run). `on_progress` is called with
    the number of problems read so far; `needs_answer`: as for `load_prompts`.

    Raises ValueError as `load_prompts`, `PromptStream` and `IteratorStream` do, and for a `before` of other data.
    """
    if config.streamed:
        log.warning("data.source: %s is read as the run goes on, in its order (see data.limit)", config.source)
        stream: PromptStream = IteratorStream(config, encode, max_prompt_length, on_progress, needs_answer=needs_answer)
    else:
        prompts = load_prompts(config, on_progress, needs_answer=needs_answer)
        stream = PromptStream(prompts, config, encode, max_prompt_length)
        if stream.size < config.batch_prompts:
            log.warning("data.batch_prompts: %d is more than the %d problems", config.batch_prompts, stream.size)
    if before is not None:
        stream.load_state_dict(before)
    return stream


class _Place(NamedTuple):
    """Where a stream is: `taken` prompts (or rows of a function) of the epoch, `skipped`, the prompts of all epochs
    that were too long and the rows that were no problem, and `digest`, a hash of the problems taken of a function."""

    epoch: int = 0
    taken: int = 0
    skipped: int = 0
    digest: str = ""


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
        self._config, self._encode = config, encode
        # All are encoded here: a prompt that cannot be encoded would stop the run in the middle, and after each resume.
        self._too_long = {
            index for index, prompt in enumerate(prompts) if too_long(prompt, encode(prompt), max_prompt_length, config)
        }
        self.size: int | None = len(prompts) - len(self._too_long)  # prompts that can be drawn; None: not known
        if not self.size:
            raise InputError(
                f"data.max_prompt_length: all {len(prompts)} prompts have more than {max_prompt_length} tokens"
            )
        self._drawn = _Place(skipped=len(self._too_long))
        self._order = self._shuffled()
        self._fingerprint = _fingerprint(prompts, encode(prompts[0]))

    @property
    def skipped(self) -> int:
        """The number of too long prompts and of rows that are no problem before the prompt drawn last. A function's
        prompt that occurs again counts again."""
        return self._drawn.skipped

    @property
    def epoch(self) -> int:
        """The epoch of the prompt drawn last, from 0."""
        return self._drawn.epoch

    def next(self, n: int, on_poll: Callable[[], None] = lambda: None) -> list[Prompt]:
        """The next `n` prompts, as copies with `tokens` set. `on_poll` is called while this waits for a function's
        items. An exception of `on_poll` ends the wait; the prompts drawn until then are not drawn again."""
        return [self.encoded(prompt) for prompt in self.candidates(n, on_poll)]

    def candidates(self, n: int, on_poll: Callable[[], None] = lambda: None) -> list[Prompt]:
        """The next `n` prompts, to be `encoded`."""
        return [self._draw(on_poll) for _ in range(n)]

    def encoded(self, prompt: Prompt) -> Prompt:
        """A copy of one of the `candidates` with `tokens` set."""
        return dataclasses.replace(prompt, tokens=self._encode(prompt))

    def _draw(self, on_poll: Callable[[], None]) -> Prompt:
        if self._drawn.taken == self.size:
            self._drawn = self._drawn._replace(epoch=self.epoch + 1, taken=0)
            self._order = self._shuffled()
        self._drawn = self._drawn._replace(taken=self._drawn.taken + 1)
        return self.prompts[self._order[self._drawn.taken - 1]]

    def _shuffled(self) -> list[int]:
        # Python guarantees that an integer seed gives the same random() in all versions, but not the same shuffle().
        seed = hashlib.sha256(f"{self._config.shuffle_seed}/{self.epoch}".encode()).digest()
        generator = random.Random(int.from_bytes(seed, "big"))
        keys = [generator.random() for _ in self.prompts]
        return sorted(set(range(len(keys))) - self._too_long, key=keys.__getitem__)

    def state_dict(self) -> dict[str, Any]:
        """Plain data of a fixed size: the stream's place, and a fingerprint of the prompts (`_fingerprint`)."""
        return {**self._drawn._asdict(), "fingerprint": self._fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state`. Raises ValueError where `state` belongs to other prompts."""
        place = _Place(*(state[name] for name in _Place._fields))
        if state["fingerprint"] != self._fingerprint or not self._go_on(place):
            raise InputError(
                f"data.source: {self._config.source} has changed: the checkpoint's run has drawn from other problems "
                "(ids, order, problems, answers, or the tokens of the first one); resume with the same data, or start "
                "a new output_dir. A function has to yield the same items each time it is called: give its random "
                "numbers a seed"
            )

    def _go_on(self, place: _Place) -> bool:
        """False where other problems lie before `place`."""
        self._drawn = place
        self._order = self._shuffled()
        return True


def _fingerprint(prompts: Sequence[Prompt], first: list[int]) -> str:
    """A hash of the ids, problems and answers in order, and of the first prompt's tokens: these show a change of
    tokenizer or template."""
    digest = hashlib.sha256(repr(first).encode())
    for p in prompts:
        digest.update(repr((p.prompt_id, p.messages, p.text, p.answer)).encode("utf-8", "backslashreplace"))
    return digest.hexdigest()


class _Reader:
    """Takes items from iterators on a separate thread, which does not keep the process alive, so that a request to stop
    ends the wait for an item."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[tuple[Iterator, Future]] = queue.SimpleQueue()
        self._pending: Future | None = None  # the item of an interrupted wait
        threading.Thread(target=self._read, name="data", daemon=True).start()

    def next(self, items: Iterator[Any], on_poll: Callable[[], None]) -> Any:
        """The next item of `items`, None at their end. Raises what the iterator raises.

        `on_poll` is called every POLL_EVERY seconds of the wait. An exception of `on_poll` ends the wait, and the next
        call gets the item that this call requested.
        """
        if self._pending is None:
            self._pending = Future()
            self._asked.put((items, self._pending))
        while not wait([self._pending], POLL_EVERY).done:
            on_poll()
        answer, self._pending = self._pending, None
        return answer.result()

    def _read(self) -> None:
        while True:
            items, answer = self._asked.get()
            try:
                answer.set_result(next(items, None))
            except BaseException as error:  # any exception is for the thread that called `next`
                answer.set_exception(error)


class IteratorStream(PromptStream):
    """Prompts without end, in the order in which the function `config.source` yields them.

    If the iterator ends, the function is called again, and a new epoch begins. Only the first batch is read ahead, so
    that errors in the data show before the run. The ids of all items stay in memory with a hash of the content. An id
    that occurs again is the same problem; it is an error if its content differs. Arguments and errors are as for
    `open_stream` and `PromptStream`. A resumed run calls the function again and skips the items that were taken.
    """

    def __init__(
        self,
        config: DataConfig,
        encode: Callable[[Prompt], list[int]],
        max_prompt_length: int | None,
        on_progress: Callable[[int], None] = lambda count: None,
        *,
        needs_answer: bool = False,
    ) -> None:
        self.prompts, self.size = (), None  # none is known before the run
        self._config, self._encode, self._limit, self._on_progress = config, encode, max_prompt_length, on_progress
        self._bad: InputError | None = None  # what is wrong with the first row that was skipped as no problem
        self._known: dict[str, str] = {}  # id -> digest of the content
        self._reader = _Reader()
        self._drawn = self._read = _Place()
        self._opened = functools.partial(located_prompts, config, needs_answer=needs_answer)
        self._items = self._opened()
        self._ahead: deque[tuple[Prompt, _Place]] = deque()
        while len(self._ahead) < config.batch_prompts:
            self._ahead.append((self._next(lambda: None), self._read))
            on_progress(len(self._ahead))
        first = self._ahead[0][0]
        self._fingerprint = _fingerprint([first], first.tokens)

    def encoded(self, prompt: Prompt) -> Prompt:
        """Returns `prompt`, one of the `candidates`, as it is: prompts are encoded as they are read."""
        return prompt

    def _draw(self, on_poll: Callable[[], None]) -> Prompt:
        prompt, self._drawn = self._ahead.popleft() if self._ahead else (self._next(on_poll), self._read)
        return prompt

    def _next(self, on_poll: Callable[[], None]) -> Prompt:
        """The iterator's next problem that is not too long; where it has ended, the first of the next epoch."""
        for _ in range(SKIPPED_IN_A_ROW):
            prompt = self._take(on_poll)
            if prompt is not None:
                tokens = self._encode(prompt)
                if not too_long(prompt, tokens, self._limit, self._config):
                    return dataclasses.replace(prompt, tokens=tokens)
            self._read = self._read._replace(skipped=self._read.skipped + 1)
        raise InputError(
            f"data.source: {SKIPPED_IN_A_ROW:,} rows of {self._config.source} in a row are no problems or have more "
            f"than {self._limit} tokens{'' if self._bad is None else f'; the first that is none: {self._bad}'}"
        )

    def _take(self, on_poll: Callable[[], None]) -> Prompt | None:
        """The iterator's next item, None for a row that is no problem."""
        while (item := self._reader.next(self._items, on_poll)) is None:
            if not self._read.taken:
                raise InputError(
                    f"data.source: {self._config.source} has no prompts "
                    "(it has to return a new iterator each time it is called)"
                )
            self._items, self._read = self._opened(), _Place(self._read.epoch + 1, skipped=self._read.skipped)
        self._read = self._read._replace(taken=self._read.taken + 1)
        where, prompt = item
        if isinstance(prompt, InputError):
            if self._bad is None:
                self._bad = prompt
                log.warning("data.source: rows that are no problems are counted in data/skipped_prompts: %s", prompt)
            return None
        content = content_digest(prompt)
        if self._known.setdefault(prompt.prompt_id, content) != content:
            raise id_taken(prompt, where, "an earlier problem", self._config)
        chained = f"{self._read.digest} {content} {prompt.prompt_id}".encode("utf-8", "surrogatepass")
        self._read = self._read._replace(digest=hashlib.sha256(chained).hexdigest())
        return prompt

    def _go_on(self, place: _Place) -> bool:
        if place == self._drawn:
            return True  # to skip the items a second time could take hours
        self._items, self._read = self._opened(), _Place(place.epoch, skipped=place.skipped)
        self._ahead.clear()
        while self._read[:2] < place[:2]:
            self._take(lambda: None)
            self._on_progress(self._read.taken)
        self._drawn = self._read
        return self._read == place


def too_long(prompt: Prompt, tokens: list[int], limit: int | None, config: DataConfig) -> bool:
    """Whether `prompt` has more than `limit` tokens; an InputError, if `config.on_long_prompt` says so."""
    if limit is None or len(tokens) <= limit:
        return False
    if config.on_long_prompt == "error":
        raise InputError(
            f"prompt {prompt.prompt_id!r} has {len(tokens)} tokens, above the limit of {limit}; "
            "raise data.max_prompt_length or set data.on_long_prompt: skip"
        )
    return True
