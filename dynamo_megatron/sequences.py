"""Token sequences as the policy trains on them, and which of their tokens are responses."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from dynamo_megatron.errors import InputError


@dataclass(frozen=True)
class Sequences:
    """S sequences of a prompt and its response, T tokens in all, R of them in responses.

    Sequence s owns `tokens[offsets[s]:offsets[s + 1]]`, of which the first `prompt_lengths[s]` are the prompt. The
    "slot" of a response token is its index in [0, R), through all responses in order.

    With an agent a sequence is an episode of one or more segments, and each segment is a sequence of its own for the
    model. `trained` then says which tokens belong to the response, and `prompt_lengths` counts the others. So it is in
    `sft`, where a conversation has several answers.
    """

    prompt_ids: list[str]
    tokens: np.ndarray  # int64 [T]
    offsets: np.ndarray  # int64 [S + 1]
    prompt_lengths: np.ndarray  # int64 [S]
    trained: np.ndarray | None = field(default=None, kw_only=True)  # bool [T]; None: all after the prompt
    # int64 [G], ascending: indices in `tokens` where segments begin; None: one segment per sequence
    segment_starts: np.ndarray | None = field(default=None, kw_only=True)

    @property
    def response_lengths(self) -> np.ndarray:
        """int64 [S], tokens."""
        return np.diff(self.offsets) - self.prompt_lengths

    @property
    def response_offsets(self) -> np.ndarray:
        """int64 [S + 1]: sequence s owns the slots from entry s up to, but without, entry s + 1."""
        return np.concatenate([[0], np.cumsum(self.response_lengths)]).astype(np.int64)

    def name(self, sequence: int) -> str:
        """The sequence's name in messages."""
        return f"prompt {self.prompt_ids[sequence]!r}"

    def check_tokens(self, vocab_size: int) -> None:
        """Raises ValueError naming the first token that is not in [0, vocab_size)."""
        if len(self.tokens) == 0 or (self.tokens.min() >= 0 and self.tokens.max() < vocab_size):
            return
        wrong = int(np.flatnonzero((self.tokens < 0) | (self.tokens >= vocab_size))[0])
        sequence = int(np.searchsorted(self.offsets, wrong, side="right")) - 1
        place = wrong - int(self.offsets[sequence])
        where = "prompt" if place < self.prompt_lengths[sequence] else "response"
        raise InputError(
            f"{self.name(sequence)}: token id {self.tokens[wrong]} at position {place}, in the {where}, is not in the "
            f"model's vocabulary (0 to {vocab_size - 1}); it comes from another tokenizer, or the record is damaged"
        )

    def response(self, sequence: int) -> np.ndarray:
        """int64, the response tokens of `sequence`."""
        own = slice(int(self.offsets[sequence]), int(self.offsets[sequence + 1]))
        if self.trained is not None:
            return self.tokens[own][self.trained[own]]
        return self.tokens[own][self.prompt_lengths[sequence] :]

    def segments(self, sequences: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns three arrays int64 [g] for the g segments of `sequences`: the index in `sequences` of the sequence
        that each segment belongs to, and where the segment begins and ends in `tokens`."""
        if (starts := self.segment_starts) is None:
            return np.arange(len(sequences)), self.offsets[sequences], self.offsets[sequences + 1]
        first = np.searchsorted(starts, self.offsets[sequences])
        end = np.searchsorted(starts, self.offsets[sequences + 1])
        chosen = np.concatenate([np.arange(i, j) for i, j in zip(first, end, strict=True)] or [np.zeros(0, np.int64)])
        owner = np.repeat(np.arange(len(sequences)), end - first)
        return owner, starts[chosen], np.append(starts[1:], len(self.tokens))[chosen]

    def in_response(self, places: np.ndarray, sequences: np.ndarray) -> np.ndarray:
        """bool: whether the tokens at `places` belong to a response. `sequences`: the sequence that owns each token."""
        if self.trained is not None:
            return self.trained[places]
        return places - self.offsets[sequences] >= self.prompt_lengths[sequences]

    def slots(self, places: np.ndarray, sequences: np.ndarray) -> np.ndarray:
        """int64: the slots of the response tokens at `places`. `sequences`: the sequence that owns each token."""
        if self.trained is not None:
            return self._trained_until[places] - 1
        return self.response_offsets[sequences] + places - self.offsets[sequences] - self.prompt_lengths[sequences]

    @cached_property
    def _trained_until(self) -> np.ndarray:
        assert self.trained is not None
        return np.cumsum(self.trained)

    def per_token(self, per_sequence: np.ndarray) -> np.ndarray:
        """Repeats each sequence's value for each of its response tokens: [S] to [R]."""
        return np.repeat(per_sequence, self.response_lengths)
