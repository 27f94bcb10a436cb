"""Generalised advantage estimation, the value loss and explained variance, against loops written by hand."""

import numpy as np
import pytest
import torch

from dynamo_megatron.algorithm import gae
from dynamo_megatron.types import Sequences


def by_hand(rewards, values, lengths, gamma, lam):
    """The sums of arXiv 1506.02438, Eq. 16, term by term: no recursion."""
    advantages, start = [], 0
    for n in lengths:
        r, v = rewards[start : start + n], [*values[start : start + n], 0.0]
        deltas = [r[t] + gamma * v[t + 1] - v[t] for t in range(n)]
        for t in range(n):
            advantages.append(sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n)))
        start += n
    return np.array(advantages)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.97, 0.8), (1.0, 1.0), (0.9, 0.0)])
def test_gae_is_the_sum_of_discounted_errors(gamma, lam):
    rng = np.random.default_rng(0)
    for _ in range(20):
        lengths = rng.integers(0, 9, 6)
        rewards, values = rng.normal(size=(2, int(lengths.sum())))
        found = gae.generalised_advantages(rewards, values, lengths, gamma, lam)
        expected = by_hand(rewards, values, lengths, gamma, lam)
        np.testing.assert_allclose(found.advantages, expected, rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(found.returns, found.advantages + values)


def turns_by_hand(rewards, values, masks, starts, gamma, lam):
    """Advantage and return of each trained token of episodes, by loops. masks: of their tokens; starts: of segments."""
    slot, advantages, returns = 0, [], []
    for mask, begins in zip(masks, starts, strict=True):
        turns, previous = [], False
        for t, trained in enumerate(mask):
            if trained:
                if not previous or t in begins:
                    turns.append([])
                turns[-1].append(slot)
                slot += 1
            previous = trained
        following, later, found = 0.0, 0.0, []
        for turn in reversed(turns):
            value = values[turn[0]]
            later = sum(rewards[i] for i in turn) + gamma * following - value + gamma * lam * later
            following = value
            found.append((later, later + value, len(turn)))
        for advantage, target, count in reversed(found):
            advantages += [advantage] * count
            returns += [target] * count
    return advantages, returns


def test_turns_as_steps_beside_loops():
    rng = np.random.default_rng(0)
    for agents in (True, True, True, False):
        masks = [rng.random(n) < 0.6 for n in rng.integers(1, 12, 30)] + [np.zeros(3, bool)]
        if not agents:
            masks = [np.sort(mask) for mask in masks]  # a prompt, then a response
        starts = [{0, *(rng.integers(0, len(m), 1 if agents else 0).tolist())} for m in masks]
        offsets = np.cumsum([0, *map(len, masks)])
        places = [np.array(sorted(s)) + o for s, o in zip(starts, offsets, strict=False)]
        own = {"trained": np.concatenate(masks), "segment_starts": np.concatenate(places)} if agents else {}
        lengths = np.array([m.sum() for m in masks])
        whole = Sequences([""] * 31, np.zeros(offsets[-1], np.int64), offsets, np.diff(offsets) - lengths, **own)
        rewards, values = rng.normal(size=(2, int(lengths.sum())))
        found = gae.turn_advantages(rewards, values, whole.turns(), 0.9, 0.7)
        expected = turns_by_hand(rewards, values, masks, starts, 0.9, 0.7)
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_outcomes_come_with_the_last_token_and_process_rewards_with_their_own():
    process = np.array([0.5, np.nan, np.nan, 2.0, np.nan])
    found = gae.token_rewards(np.array([1.0, -1.0, 7.0]), np.array([3, 2, 0]), [process], 0.1)
    np.testing.assert_allclose(found, [0.05, 0, 1.0, 0.2, -1.0])


def test_whitened():
    values = np.array([1.0, 2.0, 4.0, 9.0])
    np.testing.assert_allclose(gae.whitened(values), (values - 4) / np.sqrt(values.var(ddof=1) + 1e-8), rtol=1e-14)
    assert gae.whitened(np.zeros(0)).shape == (0,) and gae.whitened(np.array([3.0])).tolist() == [0.0]


def test_value_loss_holds_a_value_within_the_clip():
    """Old value 0, clip .2: beyond it the loss is of the held value where that is larger, and has no gradient."""
    values = torch.tensor([0.1, 0.5, 0.5, -0.5], dtype=torch.float64, requires_grad=True)
    returns, old = torch.tensor([1.0, 1.0, 0.0, -1.0], dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    loss, clipped = gae.value_loss(values, old, returns, 0.2)
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    np.testing.assert_allclose(loss.detach(), [0.405, 0.32, 0.125, 0.32])
    np.testing.assert_allclose(gradient, [-0.9, 0.0, 0.5, 0.0])
    assert clipped.tolist() == [False, True, False, True]
    loss, clipped = gae.value_loss(values, old, returns, None)
    np.testing.assert_allclose(loss.detach(), [0.405, 0.125, 0.125, 0.125])
    assert not clipped.any()


def test_explained_variance():
    returns = np.array([0.0, 1.0, 2.0])
    assert gae.explained_variance(returns, returns) == 1 and gae.explained_variance(np.full(3, 5.0), returns) == 0
    assert gae.explained_variance(-returns, returns) == pytest.approx(-3)
    assert gae.explained_variance(returns, np.full(3, 0.1)) == 0 == gae.explained_variance(returns[:0], returns[:0])
