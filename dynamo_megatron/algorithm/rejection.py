"""Which rollouts are not what their server said they are: sampled from other weights, or with other logprobs."""

from __future__ import annotations

import numpy as np

SHORTEST = 8  # tokens: a shorter response counts as this long, since one token alone may be far apart


def mean_gaps(logprobs: np.ndarray, engine_logprobs: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """float64 [S]: mean |policy - engine logprob| of each response, nats; NaN or inf where one is not finite.

    `logprobs`, `engine_logprobs`: [R], natural log, through the responses of `lengths` (int [S], tokens) in order.
    """
    owner = np.repeat(np.arange(len(lengths)), lengths)
    with np.errstate(invalid="ignore"):
        gap = np.abs(logprobs.astype(np.float64) - engine_logprobs)
        return np.bincount(owner, weights=gap, minlength=len(lengths)) / np.maximum(lengths, SHORTEST)


def rejections(
    logprobs: np.ndarray,
    engine_logprobs: np.ndarray,
    lengths: np.ndarray,
    weight_versions: np.ndarray,
    version: int,
    max_mean_gap: float | None,
) -> dict[int, str]:
    """Rollout (index) -> why it is rejected.

    weight_versions: int [S, 2], the oldest and newest that a response was sampled from; both must be `version`.
    max_mean_gap: of `mean_gaps`, nats; None: any finite one. A response without tokens is never rejected.
    """
    gaps, reasons = mean_gaps(logprobs, engine_logprobs, lengths), {}
    for i in np.flatnonzero(lengths):
        oldest, newest = weight_versions[i]
        if (oldest, newest) != (version, version):
            spans = f"{oldest}" if oldest == newest else f"{oldest} to {newest}"
            reasons[int(i)] = f"sampled from weight version {spans}, not {version}"
        elif not np.isfinite(gaps[i]):
            reasons[int(i)] = "a logprob that is not finite"
        elif max_mean_gap is not None and gaps[i] > max_mean_gap:
            reasons[int(i)] = f"logprobs {gaps[i]:.3g} nats from the policy's on average"
    return reasons
