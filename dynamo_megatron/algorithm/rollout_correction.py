"""How far the policy that trains and the engine that sampled are apart: importance weights that correct for it, and
rollouts that are rejected because they are not samples of the policy.

With d = log pi_policy - log pi_engine of a sampled token, exp(d) corrects a token and exp(sum of d) a response.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from dynamo_megatron.algorithm.arrays import torch_function
from dynamo_megatron.algorithm.losses import MAX_LOG_RATIO, response_log_ratios
from dynamo_megatron.config import RolloutCorrectionConfig

MAX_EXPONENT = 700.0  # nats; float64 overflows beyond 709


@torch_function
def importance_ratios(
    log_ratio: Tensor, lengths: Tensor, level: str, add_up: Callable[[Tensor], object] | None = None
) -> Tensor:
    """exp(d) of each token, or of its response's sum (`level: sequence`), [n] of log_ratio's dtype, at most e^20.

    log_ratio: d, float [n], nats, through the responses of `lengths` (int [S], tokens) in order. `add_up`: as in
    `response_log_ratios`.
    """
    if level == "sequence":
        log_ratio = response_log_ratios(log_ratio, lengths, "sequence", add_up)
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


@torch_function
def correction_weights(ratios: Tensor, config: RolloutCorrectionConfig) -> Tensor:
    """Factors of the token weights, [n]: the ratios clamped to [low, high] (`truncate`, with `low` 0 as in arXiv
    1802.01561, section 4.1), or 0 outside (`mask`)."""
    if config.kind == "truncate":
        return ratios.clamp(config.low, config.high)
    return torch.where((ratios >= config.low) & (ratios <= config.high), ratios, 0.0)


@torch_function
def mismatch(log_ratio: Tensor, lengths: Tensor, config: RolloutCorrectionConfig | None) -> dict[str, float]:
    """`kl`, `ratio_max` and, with a config, `truncated` and `weight_mean` over the n tokens; 0 without a token.

    kl: estimate of KL(engine || policy) per token, nats, the plain mean of exp(d) - 1 - d in float64. ratio_max: the
    largest token ratio, with a config the largest at its level. truncated: share of tokens whose ratio is outside
    [low, high]. weight_mean: mean correction weight; 1 if policy and engine agree.
    """
    if len(log_ratio) == 0:
        return {"kl": 0.0, "ratio_max": 0.0} | ({"truncated": 0.0, "weight_mean": 0.0} if config else {})
    d = log_ratio.double()
    ratios = importance_ratios(d, lengths, config.level if config else "token")
    found = {"kl": float(((d.clamp(max=MAX_EXPONENT).expm1() - d) / len(d)).sum()), "ratio_max": float(ratios.max())}
    if config is not None:
        found["truncated"] = float(((ratios < config.low) | (ratios > config.high)).double().mean())
        found["weight_mean"] = float(correction_weights(ratios, config).mean())
    return found


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
