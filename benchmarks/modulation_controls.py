"""What the token modulation is measured against: controls for `algorithm.advantage.entropy_shaping`.

configs/compare/modulation_class.yaml and modulation_sums.yaml name `permuted` and `tilted`, in the repository's root.
Each has the factors of `algorithm.modulation` with alpha 1, from the statistics that the step began with: in the one
update of such a step `modulated` is the built-in modulation. They tell apart what the modulation may owe its gain to:

- `permuted`: the same factors, on other tokens. What is left is their spread and the larger weight of right answers.
- `tilted`: one factor for all tokens of right answers, the mean of theirs. What is left is that larger weight alone.
"""

from __future__ import annotations

import numpy as np
import torch

from dynamo_megatron.algorithm.custom_shaping import TokenInputs
from dynamo_megatron.algorithm.modulation import (
    Modulated,
    ModulationConfig,
    entropy_change,
    modulate,
    modulation_ranges,
)
from dynamo_megatron.algorithm.selection import random_keys

MODULATION = ModulationConfig(alpha=1.0)
CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}  # acts nowhere: every ratio is 1


def factors(inputs: TokenInputs) -> Modulated:
    a, everywhere = inputs.advantages.float(), torch.ones_like(inputs.entropy)
    change = entropy_change(
        a,
        inputs.logprobs,
        inputs.entropy,
        inputs.logprobs,
        everywhere,
        **CLIP,
        expected_pi_lambda=inputs.expected_pi_lambda,
    )
    ranges = modulation_ranges(inputs.entropy, change, everywhere)
    m = MODULATION
    return modulate(a, inputs.entropy, change, ranges, alpha=m.alpha, lambda_min=m.lambda_min, gamma=m.gamma, tau=m.tau)


def modulated(inputs: TokenInputs) -> torch.Tensor:
    """float64 [n]"""
    found = factors(inputs)
    return inputs.advantages * found.beta_comp * found.beta_stab


def permuted(inputs: TokenInputs) -> torch.Tensor:
    """float64 [n]: `modulated` with its factors in a random order among the tokens of positive advantage, and in
    another among those of negative advantage."""
    found = factors(inputs)
    factor, moved = found.beta_comp * found.beta_stab, torch.ones_like(found.beta_comp)
    lengths = np.bincount(inputs.response.numpy(), minlength=len(inputs.rollout_ids))
    keys = torch.from_numpy(random_keys(inputs.rollout_ids, lengths, seed=0))
    for sign in (-1, 1):
        tokens = (inputs.advantages.sign() == sign).nonzero()[:, 0]
        moved[tokens] = factor[tokens[keys[tokens].argsort()]]
    return inputs.advantages * moved


def tilted(inputs: TokenInputs) -> torch.Tensor:
    """float64 [n]: every positive advantage times the mean compensation of their tokens; the others as they are."""
    positive = inputs.advantages > 0
    return inputs.advantages * torch.where(positive, factors(inputs).beta_comp[positive].mean(), 1.0)
