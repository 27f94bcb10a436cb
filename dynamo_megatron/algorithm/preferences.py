"""Losses of pairs of responses, one of which is preferred."""

from __future__ import annotations

import numpy as np

from dynamo_megatron.config import DPOConfig


def preference_loss(
    chosen: np.ndarray, rejected: np.ndarray, lengths: tuple[np.ndarray, np.ndarray], config: DPOConfig
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(loss of each pair, its derivatives by `chosen` and by `rejected`), float64 [P].

    chosen, rejected: float [P], the sum over a response's tokens of log p_policy - log p_reference, nats. lengths:
    int [P] each, their tokens.

    `sigmoid`, DPO (arXiv 2305.18290, Eq. 7) with the label smoothing e of cDPO (ericmitchell.ai/cdpo.pdf, Eq. 3):
    -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h), h = chosen - rejected. `ipo` (arXiv 2310.12036, Eq. 17):
    (h - 1 / (2 beta))^2 with the means over tokens in place of the sums, as in TRL.
    """
    beta, smoothing = config.beta, config.label_smoothing
    if config.loss == "ipo":
        n_chosen, n_rejected = (np.maximum(n, 1) for n in lengths)
        gap = chosen / n_chosen - rejected / n_rejected - 1 / (2 * beta)
        return gap**2, 2 * gap / n_chosen, -2 * gap / n_rejected
    z = beta * (chosen - rejected).astype(np.float64)
    surprise, opposite = np.logaddexp(0, -z), np.logaddexp(0, z)  # -log sigmoid(z), -log sigmoid(-z)
    slope = beta * (smoothing * np.exp(-surprise) - (1 - smoothing) * np.exp(-opposite))
    return (1 - smoothing) * surprise + smoothing * opposite, slope, -slope
