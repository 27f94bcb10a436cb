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
    return _first(torch.argsort((entropy / ENTROPY_GRID).round(), descending=True, stable=True), count)


@torch_function
def covariance(advantages: Tensor, logprobs: Tensor) -> Tensor:
    """(A - mean A)(log pi - mean log pi), float64 [n], the means over the n tokens.

    The token-wise covariance of arXiv 2505.22617, section 4: where it is large, an update lowers the entropy most.
    """
    a, p = advantages.double(), logprobs.double()
    return (a - a.mean()) * (p - p.mean())


@torch_function
def clip_cov(covariance: Tensor, keys: Tensor, *, ratio: float, low: float, high: float) -> Tensor:
    """max(1, floor(ratio n)) random tokens of those with low < covariance < high, bool [n].

    Random means those with the smallest `keys` (float [n], see `random_keys`). All, if there are fewer.
    Clip-Cov (arXiv 2505.22617, section 4) takes no policy gradient on them.
    """
    inside = ((covariance > low) & (covariance < high)).nonzero()[:, 0]
    order = inside[torch.argsort(keys[inside], stable=True)]
    return _first(order, max(1, _floor(ratio, len(covariance))), len(covariance))


@torch_function
def kl_cov(covariance: Tensor, *, ratio: float) -> Tensor:
    """The max(1, floor(ratio n)) tokens of the largest covariance, bool [n]; ties go to the lower index.

    KL-Cov (arXiv 2505.22617, section 4) penalises their distance from the old policy.
    """
    return _first(torch.argsort(covariance, descending=True, stable=True), max(1, _floor(ratio, len(covariance))))


def random_keys(rollout_ids: Sequence[str], lengths: np.ndarray, *, seed: int) -> np.ndarray:
    """Uniform in [0, 1), one per token, float64 [sum lengths], from seed, rollout's id and position in the response.

    An id names step, group and index, so each step draws anew; neither ranks nor packing nor a resume change the draw.
    """
    parts = [
        np.random.default_rng(derived_seed(seed, "keys", name)).random(length)
        for name, length in zip(rollout_ids, lengths, strict=True)
    ]
    return np.concatenate([np.zeros(0), *parts])


def _floor(ratio: float, n: int) -> int:
    return math.floor(ratio * n + 1e-9)  # a product such as 0.29 * 100 lies just below the integer that it means


def _first(order: torch.Tensor, count: int, n: int | None = None) -> torch.Tensor:
    """bool [n] with the first `count` indices of `order` set; n None: `order` holds every index."""
    chosen = torch.zeros(len(order) if n is None else n, dtype=torch.bool, device=order.device)
    chosen[order[:count]] = True
    return chosen
