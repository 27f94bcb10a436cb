"""Importance weights between the policy that trains and the engine that sampled, and how far the two are apart: with
d = log pi_policy - log pi_engine of a sampled token, exp(d) corrects a token and exp(sum of d) a response."""

from __future__ import annotations

import torch
from torch import Tensor

from dynamo_megatron.algorithm.arrays import torch_function
from dynamo_megatron.algorithm.losses import MAX_LOG_RATIO
from dynamo_megatron.config import RolloutCorrectionConfig

MAX_EXPONENT = 700.0  # nats; float64 overflows beyond 709


@torch_function
def importance_ratios(log_ratio: Tensor, lengths: Tensor, level: str) -> Tensor:
    """exp(d) of each token, or of its response's sum (`level: sequence`), [n] of log_ratio's dtype, at most e^20.

    log_ratio: d, float [n], nats, through the responses of `lengths` (int [S], tokens) in order.
    """
    if level == "sequence":
        owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        log_ratio = log_ratio.new_zeros(len(lengths)).index_add_(0, owner, log_ratio)[owner]
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
    found = {
        "kl": float(((d.clamp(max=MAX_EXPONENT).expm1() - d) / len(d)).sum()),
        "ratio_max": float(ratios.max()),
    }
    if config is not None:
        found["truncated"] = float(((ratios < config.low) | (ratios > config.high)).double().mean())
        found["weight_mean"] = float(correction_weights(ratios, config).mean())
    return found
