"""Functions that the configurations of test_custom_functions.py name, right ones and wrong ones."""

import numpy as np
import torch


def rloo(inputs):
    """In the same order of operations as the built-in one, from the same lowest reward: equal bits."""
    advantages = np.zeros(len(inputs.rewards))
    for g in range(int(inputs.group.max()) + 1):
        mine = inputs.group == g
        shifted = inputs.rewards[mine] - inputs.rewards[mine].min()
        total = 0.0
        for reward in shifted:  # np.bincount adds one after another
            total += reward
        n = len(shifted)
        advantages[mine] = (shifted - total / n) * (n / max(n - 1, 1)) if n > 1 else 0.0
    return advantages


def by_rank(inputs):
    import os

    return inputs.rewards + float(os.environ["RANK"])


def grpo(inputs):
    ratio = torch.exp(inputs.logprobs - inputs.old_logprobs)
    return torch.maximum(-inputs.advantages * ratio, -inputs.advantages * ratio.clamp(0.8, 1.2))


def grpo_with_kl(inputs):
    less = inputs.reference_logprobs - inputs.logprobs
    return grpo(inputs) + inputs.kl_coef * (less.exp() - less - 1)


def nothing(inputs):
    pass


def mean(inputs):
    return grpo(inputs).mean()


def ids(inputs):
    return inputs.response


def detached(inputs):
    return grpo(inputs).detach()


def constant(inputs):
    return torch.ones_like(inputs.advantages, requires_grad=True) * inputs.advantages


def key_error(inputs):
    return {}["no such table"]


def in_backward(inputs):
    ratio = torch.exp(inputs.logprobs - inputs.old_logprobs)
    loss = -inputs.advantages * ratio
    ratio.mul_(2)  # the backward pass needs it
    return loss


def nan(inputs):
    return grpo(inputs) * torch.where(inputs.response == 1, torch.nan, 1.0)


def nan_gradient(inputs):
    return (inputs.logprobs - inputs.old_logprobs).abs().sqrt()
