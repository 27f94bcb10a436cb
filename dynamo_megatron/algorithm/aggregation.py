"""One weight per token, constant within a rollout: the loss of a mini-batch is sum_t w_t loss_t."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from dynamo_megatron.algorithm.arrays import Array, group_index, like, to_numpy
from dynamo_megatron.config.method import AGGREGATIONS


def token_weights(mode: str, lengths: Array, group_ids: Sequence[Hashable], *, max_length: int | None = None) -> Array:
    """1 / `token_divisors`, which raises the same errors."""
    return like(1.0 / token_divisors(mode, lengths, group_ids, max_length=max_length), lengths)


def token_divisors(
    mode: str, lengths: Array, group_ids: Sequence[Hashable], *, max_length: int | None = None
) -> np.ndarray:
    """What the loss of every response token of rollout s is divided by, float64 [S].

    S rollouts, P groups, n_i rollouts in group i, l_j response tokens (`lengths`) in rollout j, L = `max_length`:
    `token_mean` sum l; `sequence_mean` S l_j; `sequence_sum` S; `constant_length` S L; `prompt_mean` P n_i L (what the
    theory of the allocation assumes); `prompt_token_mean` P times the sum of l over the group. A rollout without
    response tokens has infinity, and counts in S and n_i. Raises ValueError naming the argument.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"mode: {mode!r} is unknown; one of {', '.join(AGGREGATIONS)}")
    length = to_numpy(lengths, "lengths")
    if (length < 0).any():
        raise ValueError(f"lengths: entry {int(np.flatnonzero(length < 0)[0])} is negative")
    if mode in ("constant_length", "prompt_mean") and not (max_length is not None and max_length >= 1):
        raise ValueError(f"max_length: {mode} divides by it; give the longest response in tokens, got {max_length}")
    index, groups = group_index(group_ids, len(length))
    rollouts, longest = np.float64(len(length)), np.float64(max_length or 0)

    divisor = {
        "token_mean": length.sum(),
        "sequence_mean": rollouts * length,
        "sequence_sum": rollouts,
        "constant_length": rollouts * longest,
        "prompt_mean": groups * np.bincount(index, minlength=groups)[index] * longest,
        "prompt_token_mean": groups * np.bincount(index, length, minlength=groups)[index],
    }[mode]
    return np.where(length > 0, np.maximum(divisor, 1), np.inf)
