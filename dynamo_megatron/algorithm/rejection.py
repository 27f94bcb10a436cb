"""Which rollouts are not samples of the policy: sampled from other weights, or with other logprobs."""

from __future__ import annotations

import numpy as np

SHORTEST = 8  # tokens: a shorter response counts as this long, since one token alone may be far apart


def mean_gaps(
    logprobs: np.ndarray, engine_logprobs: np.ndarray, lengths: np.ndarray, counted: np.ndarray | None = None
) -> np.ndarray:
    """float64 [S]: mean |policy - engine logprob| of each response, nats; NaN or inf if a logprob is not finite.

    `logprobs`, `engine_logprobs`: [R], natural log, through the responses of `lengths` (int [S], tokens) in order.
    `counted`: bool [R], the tokens that the mean is over; None: all.
    """
    owner = np.repeat(np.arange(len(lengths)), lengths)
    with np.errstate(invalid="ignore"):
        gap = np.abs(logprobs.astype(np.float64) - engine_logprobs)
        if counted is not None:
            gap, lengths = np.where(counted, gap, 0 * gap), np.bincount(owner, weights=counted, minlength=len(lengths))
        return np.bincount(owner, weights=gap, minlength=len(lengths)) / np.maximum(lengths, SHORTEST)


def rejections(
    logprobs: np.ndarray,
    engine_logprobs: np.ndarray,
    lengths: np.ndarray,
    weight_versions: np.ndarray,
    version: int,
    max_mean_gap: float | None,
    max_staleness: int = 0,
) -> dict[int, str]:
    """Returns index of a rejected rollout -> reason.

    weight_versions: int [R], the version of the weights that each token was sampled from; `version` (the policy's) and
    up to `max_staleness` before it are accepted. max_mean_gap: the largest accepted `mean_gaps` over the tokens of
    `version`, nats; None: any finite value. A response without tokens is never rejected.
    """
    gaps, reasons = mean_gaps(logprobs, engine_logprobs, lengths, weight_versions == version), {}
    responses, oldest_allowed = np.flatnonzero(lengths), max(0, version - max_staleness)  # -1: an unknown version
    starts = (np.cumsum(lengths) - lengths)[responses]
    oldest, newest = (f.reduceat(weight_versions, starts) if len(starts) else starts for f in (np.minimum, np.maximum))
    for i, old, new in zip(responses.tolist(), oldest.tolist(), newest.tolist(), strict=True):
        if not oldest_allowed <= old <= new <= version:
            spans = f"{old}" if old == new else f"{old} to {new}"
            allowed = f"{oldest_allowed} to {version}" if oldest_allowed < version else f"{version}"
            reasons[i] = f"sampled from weight version {spans}, not {allowed}"
        elif not np.isfinite(gaps[i]):
            reasons[i] = "a logprob that is not finite"
        elif max_mean_gap is not None and gaps[i] > max_mean_gap:
            reasons[i] = f"logprobs {gaps[i]:.3g} nats from the policy's on average"
    return reasons
