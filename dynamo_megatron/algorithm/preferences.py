"""The loss of pairs of responses, one of which is preferred."""

from __future__ import annotations

import numpy as np


def preference_loss(chosen: np.ndarray, rejected: np.ndarray, beta: float) -> tuple[np.ndarray, np.ndarray]:
    """DPO (arXiv 2305.18290, Eq. 7): (-log sigmoid(beta h) of each pair, h = chosen - rejected; its derivative by
    `chosen`, that by `rejected` is its negative), float64 [P].

    chosen, rejected: float [P], the sum over a response's tokens of log p_policy - log p_reference, nats.
    """
    z = beta * (chosen - rejected).astype(np.float64)
    return np.logaddexp(0, -z), -beta * np.exp(-np.logaddexp(0, z))
