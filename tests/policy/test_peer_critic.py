"""GAE and the critic's loss against verl's own functions (its value loss is TRL's; TRL 1.16 has no PPO any more), on
random batches with tokens between the turns of an episode. The policy's loss is in test_peers.py."""

import numpy as np
import pytest
import torch
from test_peers import ask_peers, pytestmark  # noqa: F401

from dynamo_megatron.algorithm.gae import generalised_advantages, value_loss, whitened

BATCHES, ROLLOUTS, LENGTH = 400, 6, 20


def test_advantages_returns_and_value_loss_are_verl_s(tmp_path):
    rng = np.random.default_rng(0)
    shape = (BATCHES, ROLLOUTS, LENGTH)
    mask = (rng.random(shape) < 0.8) & (np.arange(LENGTH) < rng.integers(2, LENGTH + 1, (*shape[:2], 1)))
    mask[..., 0] = True
    values = rng.normal(0, 0.5, shape)
    given = {"mask": mask.astype(float), "values": values, "new": values + rng.normal(0, 0.2, shape)}
    given["rewards"] = np.where(mask, np.where(rng.random(shape) < 0.2, rng.normal(size=shape), 0.0), 0.0)
    given["discounts"] = np.stack([rng.uniform(0.9, 1, BATCHES), rng.uniform(0, 1, BATCHES)], 1)
    given["discounts"][0] = 1, 1
    theirs, clipped_tokens = ask_peers(tmp_path, {}, **given), 0
    for b in range(BATCHES):
        here, (gamma, lam) = mask[b], given["discounts"][b]
        rewards, old, new = (given[key][b][here] for key in ("rewards", "values", "new"))
        advantages, returns = generalised_advantages(rewards, old, here.sum(1), gamma, lam)
        np.testing.assert_allclose(whitened(advantages), theirs["advantages"][b][here], rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(returns, theirs["returns"][b][here], rtol=1e-6, atol=1e-12)
        moved = torch.from_numpy(new).requires_grad_()
        loss, clipped = value_loss(moved, torch.from_numpy(old), torch.from_numpy(returns), 0.2)
        (gradient,) = torch.autograd.grad(loss.mean(), moved)
        assert loss.mean().item() == pytest.approx(theirs["loss"][b], rel=1e-6)
        np.testing.assert_allclose(gradient, theirs["gradient"][b][here], rtol=1e-6, atol=1e-12)
        assert clipped.double().mean().item() == pytest.approx(theirs["clipped"][b], abs=1e-6)
        clipped_tokens += int(clipped.sum())
    assert clipped_tokens > BATCHES
