"""How much the responses of a group differ: by their answers, and by their n-grams (NGRAM tokens in a row).

A response of fewer tokens than NGRAM has one n-gram, all of it. N-grams are compared by hashes of 64 bits.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from dynamo_megatron.algorithm.arrays import group_index

NGRAM = 4
# Odd; the hash of an n-gram is the sum over its tokens of (token + 1) times the multiplier of the place, modulo 2^64.
PLACES = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F)
MULTIPLIERS = np.array(PLACES, np.uint64)


def unique_answers(answers: Sequence[Hashable], group_ids: Sequence[Hashable]) -> np.ndarray:
    """Distinct answers / rollouts of each group of at least two, float64 [G], in the order of their first rollouts."""
    group, groups = group_index(group_ids, len(answers))
    sizes = np.bincount(group, minlength=groups)
    distinct = np.bincount(np.array([g for g, _ in set(zip(group.tolist(), answers, strict=True))], np.int64))
    return (distinct / sizes)[sizes > 1]


def distinct_ngrams(tokens: np.ndarray, lengths: np.ndarray, group_ids: Sequence[Hashable]) -> np.ndarray:
    """Distinct n-grams / n-grams of the responses of each group of at least two (distinct-n, arXiv 1510.03055), float64
    [G]; a group without tokens is left out. tokens: int64 [R], of the responses; lengths: int64 [S]."""
    group, groups = group_index(group_ids, len(lengths))
    hashes, shares = _ngrams(tokens, lengths), []
    for members in _members(group, groups):
        own = np.sort(np.concatenate([hashes[s] for s in members]))  # np.unique takes five times as long
        if len(members) > 1 and len(own):
            shares.append((1 + np.count_nonzero(own[1:] != own[:-1])) / len(own))
    return np.array(shares, np.float64)


def diversity_factors(
    weight: float,
    right: np.ndarray,
    answers: Sequence[Hashable],
    tokens: np.ndarray,
    lengths: np.ndarray,
    group_ids: Sequence[Hashable],
) -> np.ndarray:
    """What the advantage of each rollout is multiplied by, float64 [S]: 1 + weight (D_j - mean of D over the right
    rollouts of the group) if `right`, bool [S], else 1.

    The rarity D_j in [0, 1] is the mean over the group's other right rollouts of the distance to them: 1 to another
    answer, to the same one the share of j's distinct n-grams that the other lacks; 0 without others. So the factors of
    the right rollouts of a group have the mean 1, and none is below 1 - weight. tokens, lengths: as for
    `distinct_ngrams`. After Darling (arXiv 2509.02534), which multiplies rewards by such a mean distance, of classes by
    a trained model.
    """
    group, groups = group_index(group_ids, len(lengths))
    hashes, factors = _ngrams(tokens, lengths), np.ones(len(lengths))
    for members in _members(np.where(right, group, groups), groups):
        if len(members) < 2:
            continue
        answer, kinds = group_index([answers[s] for s in members], len(members))
        rarity = np.zeros(len(members))
        for same in _members(answer, kinds):
            own = [np.unique(hashes[members[k]]) for k in same]
            _, place, counts = np.unique(np.concatenate(own), return_inverse=True, return_counts=True)
            ends = np.cumsum([len(each) for each in own])
            for k, shared in zip(same, np.split(counts[place] - 1, ends[:-1]), strict=True):
                # Without tokens nothing tells it from the others of the same answer.
                common = shared.mean() if len(shared) else len(same) - 1
                rarity[k] = 1 - common / (len(members) - 1)
        factors[members] = 1 + weight * (rarity - rarity.mean())
    return factors


def _members(group: np.ndarray, groups: int) -> list[np.ndarray]:
    """The rollouts (indices, ascending) of each of the first `groups` groups."""
    order = np.argsort(group, kind="stable")
    return np.split(order, np.cumsum(np.bincount(group, minlength=groups)))[:groups]


def _ngrams(tokens: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """The hashes of each response's n-grams, uint64, as often as they occur."""
    found = []
    for own in np.split(tokens.astype(np.uint64) + np.uint64(1), np.cumsum(lengths)[:-1]):
        if 0 < len(own) < NGRAM:
            own = np.pad(own, (0, NGRAM - len(own)))
        found.append(np.lib.stride_tricks.sliding_window_view(own, NGRAM) @ MULTIPLIERS if len(own) else own)
    return found
