"""The tuples that the parts of the policy head pass to each other."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Shard(NamedTuple):
    """The columns of the vocabulary that are the rows of this rank's weight."""

    start: int  # global index of the first column
    rows: int  # rows of the weight: V/tp, padding included
    columns: int  # those that are part of the vocabulary, 0 to `rows`; the rest is padding


class Statistics(NamedTuple):
    """Per row of logits, over the whole vocabulary; [c] each, natural log."""

    maximum: Tensor  # of the logits before division by the temperature; 0 where all are -inf
    log_sum: Tensor  # log sum_j exp((z_j - maximum) / T)
    logprobs: Tensor
    entropy: Tensor
    expected_pi_lambda: Tensor  # sum_j p_j^2 (log p_j + H)
    collision: Tensor  # sum_j p_j^2


class Tokens(NamedTuple):
    """The caller's constants per labelled token, [n] each."""

    advantages: Tensor
    weights: Tensor
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None = None
    old_kl_coef: Tensor | None = None
    log_ratios: Tensor | None = None  # of the policy loss, in place of logprob - old logprob

    def at(self, chunk: slice) -> Tokens:
        return Tokens(*(None if t is None else t[chunk] for t in self))


# Sums over labelled tokens; the loss is weighted.
METRICS = (
    "loss", "entropy", "kl", "kl_square", "ratio", "ratio_square", "clipped", "clipped_dual", "damped", "boosted"
)  # fmt: skip
DAMPED, BOOSTED = 0.9, 1.1  # a token is damped if beta_stab is below 0.9, boosted if beta_comp is above 1.1


class Terms(NamedTuple):
    """For some labelled tokens, detached: gradients of the weighted loss and advantages after modulation, [n] each."""

    grad_logprobs: Tensor
    grad_entropy: Tensor
    advantages: Tensor
    sums: Tensor  # [10], of METRICS
