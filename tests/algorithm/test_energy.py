"""The energy of a rollout against autograd, and its regression on the reward."""

import numpy as np
import pytest
import torch

from dynamo_megatron.algorithm.allocation import RolloutAllocator
from dynamo_megatron.algorithm.energy import EnergyLine, rollout_energies, token_baselines


def test_the_energy_is_the_squared_norm_of_the_gradient_with_respect_to_the_logits():
    torch.manual_seed(0)
    lengths = np.array([3, 0, 5, 1])
    logits = torch.randn(9, 11, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(11, (9,))
    logp = logits.log_softmax(-1)
    chosen = logp.gather(1, labels[:, None])[:, 0]
    (gradient,) = torch.autograd.grad(chosen.sum(), logits)
    expected = [(gradient[a:b] ** 2).sum().item() for a, b in ((0, 3), (3, 3), (3, 8), (8, 9))]
    energies = rollout_energies(chosen.detach().numpy(), logp.exp().square().sum(-1).detach().numpy(), lengths)
    np.testing.assert_allclose(energies, expected, rtol=1e-12)


def test_a_sure_token_has_no_energy():
    logprobs, collision = np.zeros(2, np.float32), np.full(2, 0.9999999, np.float32)
    assert rollout_energies(logprobs, collision, np.array([2])).tolist() == [0]


def test_token_baselines_by_hand():
    """Two responses of 2 and 3 tokens, energies 1, 1 and 3, 1, 5, and one alone in its group."""
    rewards, group, lengths = np.array([1.0, 0.5, 1.0]), np.array([0, 0, 1]), np.array([2, 3, 1])
    energies = np.array([1.0, 1, 3, 1, 5, 2])
    first, second = (1 * 1 + 0.5 * 3) / 4, (1 * 2 + 0.5 * 4) / 6
    for singleton, alone in (("zero", 1.0), ("raw", 0.0)):
        found = token_baselines(rewards, group, energies, lengths, singleton)
        np.testing.assert_allclose(found, [first, second, first, second, 0, alone], rtol=1e-7)


def line(rewards, energies) -> EnergyLine:
    return EnergyLine().after(np.asarray(rewards, float), np.asarray(energies, float), 1.0)


def test_the_ratio_of_few_rollouts_by_hand():
    """One right of energy 1, one wrong of 3, and 2 rollouts of 2 at each reward: (3 + 4) / (1 + 4)."""
    assert line([1, 0], [1, 3]).score_ratio == pytest.approx(7 / 5)


def test_graded_rewards_are_on_a_line():
    rewards = np.tile(np.linspace(0, 1, 11), 2000)
    assert line(rewards, 2 - rewards).score_ratio == pytest.approx(2, rel=2e-3)


@pytest.mark.parametrize(
    ("rewards", "energies", "ratio"),
    [
        ([], [], 1),
        ([1, 0], [0, 0], 1),
        ([1, 1, 1], [1, 1, 1], 1),  # never a wrong one
        ([1, 0] * 500, [3, 1] * 500, 1),  # right ones have more: held at 1
        ([1, 0] * 500, [1, 100] * 500, 8),
        ([1, 0] * 500 + [1.5], [1, 4] * 500 + [1], 1),  # the rule is for rewards in [0, 1]
        ([1, 0] * 500 + [-1], [1, 4] * 500 + [1], 1),
    ],
)
def test_what_holds_the_ratio(rewards, energies, ratio):
    assert line(rewards, energies).score_ratio == pytest.approx(ratio)


def test_earlier_steps_are_forgotten():
    allocator = RolloutAllocator({"half_life": 1.0})
    for step in range(12):
        wrong = 1.0 if step < 6 else 4.0
        allocator.observe(["a"] * 200, [1, 0] * 100, [True, False] * 100, step, energy=[1.0, wrong] * 100)
    assert allocator.history.energy_line.score_ratio == pytest.approx(4, rel=0.1)
