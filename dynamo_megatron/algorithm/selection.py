"""Which response tokens of a mini-batch a method selects, by the statistics of the logprob pass.

All arrays are [n], the mini-batch's response tokens in the order of their slots. Every rank holds them all, so every
rank makes the same choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dynamo_megatron.algorithm.arrays import torch_function
from dynamo_megatron.runtime.seeds import derived_seed

# Rollouts of one prompt begin in the same state, so many entropies are equal except for rounding, which depends on the
# packing. Rounded to this grid (nats) they are equal, and the lower slot decides.
ENTROPY_GRID = 2.0**-13


@torch_function
def top_entropy(entropy: Tensor, ratio: float) -> Tensor:
    """The ceil(ratio n) tokens of the highest entropy, bool [n]: forking tokens (arXiv 2506.01939, Eq. 6).

    entropy: float [n], nats, compared after rounding to `ENTROPY_GRID`; ties go to the lower index.
    """
    count = math.ceil(ratio * len(entropy) - 1e-9)
    order = torch.argsort((entropy / ENTROPY_GRID).round(), descending=True, stable=True)
    return _first(order, count, len(entropy))


@torch_function
def covariance(advantages: Tensor, logprobs: Tensor) -> Tensor:
    """(A - mean A)(log pi - mean log pi), float64 [n], the means over the n tokens (arXiv 2505.22617, section 4)."""
    a, p = advantages.double(), logprobs.double()
    a = a - a[:1]  # equal advantages become 0 exactly
    return (a - a.mean()) * (p - p.mean())


@torch_function
def clip_cov(covariance: Tensor, keys: Tensor, *, ratio: float, low: float, high: float) -> Tensor:
    """max(1, floor(ratio n)) of the tokens with low < covariance < high, bool [n]: those with the smallest `keys`
    (float [n], see `random_keys`). Clip-Cov (arXiv 2505.22617, section 4) takes no policy gradient on them."""
    inside = ((covariance > low) & (covariance < high)).nonzero()[:, 0]
    return _first(inside[torch.argsort(keys[inside], stable=True)], _least_one(ratio, covariance), len(covariance))


@torch_function
def kl_cov(covariance: Tensor, *, ratio: float) -> Tensor:
    """The max(1, floor(ratio n)) tokens of the largest covariance, bool [n]; ties go to the lower index. KL-Cov (arXiv
    2505.22617, section 4) penalises their distance from the old policy."""
    order = torch.argsort(covariance, descending=True, stable=True)
    return _first(order, _least_one(ratio, covariance), len(covariance))


def random_keys(rollout_ids: Sequence[str], lengths: np.ndarray, *, seed: int) -> np.ndarray:
    """Uniform in [0, 1), one per token, float64 [sum lengths], from seed, rollout's id (which names the step) and
    position in the response alone."""
    parts = [
        np.random.default_rng(derived_seed(seed, "keys", name)).random(length)
        for name, length in zip(rollout_ids, lengths, strict=True)
    ]
    return np.concatenate([np.zeros(0), *parts])


def _least_one(ratio: float, tokens: Tensor) -> int:
    # A product such as 0.29 * 100 lies just below the integer that it means.
    return max(1, math.floor(ratio * len(tokens) + 1e-9))


def _first(order: Tensor, count: int, n: int) -> Tensor:
    """bool [n] with the first `count` indices of `order` set."""
    chosen = torch.zeros(n, dtype=torch.bool, device=order.device)
    chosen[order[:count]] = True
    return chosen
