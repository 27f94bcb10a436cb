"""The expected cost of a prompt's rollouts."""

from __future__ import annotations

import numpy as np

from dynamo_megatron.algorithm.history import Statistics

# The weight, in rollouts, of the pool's mean length in every prompt's expected length.
POOL_ROLLOUTS = 4.0


def expected_tokens(prompts: Statistics, pool: Statistics) -> np.ndarray:
    """Expected response tokens of a rollout of each of `prompts`, float64 [N] above 0: the prompt's mean length shrunk
    to the pool's; 1 for all if no length is known."""
    trials, tokens = pool.token_trials.sum(), pool.tokens.sum()
    mean = tokens / trials if tokens > 0 and trials > 0 else 1.0
    return (prompts.tokens + POOL_ROLLOUTS * mean) / (prompts.token_trials + POOL_ROLLOUTS)
