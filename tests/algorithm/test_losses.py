import numpy as np
import pytest
import torch

from dynamo_megatron.algorithm.aggregation import token_weights
from dynamo_megatron.algorithm.losses import (
    PolicyLossConfig,
    clipped_policy_loss,
    kl_estimate,
    policy_loss_terms,
    response_log_ratios,
)

MODES = {
    "token-mean": ("token_mean", 1),
    "seq-mean-token-sum": ("sequence_sum", 1),
    "seq-mean-token-mean": ("sequence_mean", 1),
    "seq-mean-token-sum-norm": ("constant_length", None),  # None: times S
}


def test_vectors(vectors):
    for case in vectors("losses"):
        names = ("logprobs", "old_logprobs", "advantages", "mask")
        logprobs, old, advantages, mask = (np.array(case[name]) for name in names)
        rollouts, length = mask.shape
        lengths = mask.sum(1).astype(int)
        variable = torch.tensor(logprobs, requires_grad=True)
        clip = {f"clip_ratio_{name}": case[f"clip_{name}"] for name in ("low", "high", "c")}
        of_torch = clipped_policy_loss(variable, torch.tensor(old), torch.tensor(advantages), **clip)
        of_numpy = clipped_policy_loss(logprobs, old, advantages, **clip)
        for reference, (mode, factor) in MODES.items():
            weights = token_weights(mode, lengths, range(rollouts), max_length=length)[:, None] * mask
            got = (weights * of_numpy.loss).sum() * (factor or rollouts)
            assert got == pytest.approx(case["loss"][reference], rel=1e-6)
        share = token_weights("token_mean", lengths, range(rollouts))[:, None] * mask
        assert (share * of_numpy.clipped).sum() == pytest.approx(case["clipfrac"]["token-mean"], rel=1e-6)
        assert (share * of_numpy.clipped_dual).sum() == pytest.approx(case["clipfrac_lower"]["token-mean"], rel=1e-6)
        (torch.tensor(share) * of_torch.loss).sum().backward()
        np.testing.assert_allclose(variable.grad, case["grad_logprobs_token_mean"], rtol=1e-6, atol=1e-12)
        for kind, want in case["kl"].items():
            got = kl_estimate(logprobs, np.array(case["ref_logprobs"]), kind)
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-12)


def test_far_off_policy_tokens_stay_finite():
    logprobs = torch.tensor([200.0, -200.0], requires_grad=True)
    for advantage in (1.0, -1.0):
        loss = clipped_policy_loss(
            logprobs, torch.zeros(2), torch.full((2,), advantage), clip_ratio_low=0.2, clip_ratio_high=0.2
        ).loss
        assert loss.isfinite().all()
        assert torch.autograd.grad(loss.sum(), logprobs)[0].tolist() == [0, 0]
    assert kl_estimate(torch.tensor([-200.0]), torch.zeros(1), "k3").item() == 10


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_a_response_beyond_the_bound_of_its_log_ratio_has_no_gradient_and_counts_as_clipped(advantage):
    """Two responses of 40 tokens that became likelier, without a dual clip: log ratios of 19.9 and 20.1."""
    logprobs = torch.tensor([19.9 / 40] * 40 + [20.1 / 40] * 40, dtype=torch.float64, requires_grad=True)
    zero, advantages = torch.zeros(80).double(), torch.full((80,), advantage).double()
    log_ratios = response_log_ratios(logprobs, torch.tensor([40, 40]), "sequence")
    no_clip = PolicyLossConfig(clip_ratio_low=1.0, clip_ratio_high=1e9)
    terms = policy_loss_terms(logprobs, zero, zero, advantages, None, no_clip, log_ratios=log_ratios)
    terms.loss.sum().backward()
    np.testing.assert_allclose(logprobs.grad, [-advantage * np.exp(19.9)] * 40 + [0] * 40, rtol=1e-9)
    assert terms.clipped.tolist() == [False] * 40 + [True] * 40 and not terms.clipped_dual.any()
    ceiling = PolicyLossConfig(clip_ratio_low=1.0, clip_ratio_high=1e9, clip_ratio_c=3.0)
    terms = policy_loss_terms(logprobs, zero, zero, advantages, None, ceiling, log_ratios=log_ratios)
    assert not (terms.clipped & terms.clipped_dual).any()  # each counts once
    assert (terms.clipped | terms.clipped_dual)[40:].all()


def test_a_term_that_is_off_brings_in_no_nan():
    one, nan = torch.ones(1), torch.full((1,), float("nan"))
    terms = policy_loss_terms(one, nan, one, one, nan, PolicyLossConfig())
    assert terms.loss.item() == -1 and terms.kl.isnan()
    assert policy_loss_terms(one, one, one, one, None, PolicyLossConfig()).kl is None


def test_the_log_ratio_of_a_response_is_that_of_all_its_tokens_wherever_they_are():
    rng = np.random.default_rng(0)
    lengths = np.array([5, 0, 1, 30, 4])
    d = rng.normal(0, 0.5, lengths.sum())
    parts = np.split(d, np.cumsum(lengths)[:-1])
    sums = [part.sum() for part in parts]
    means = [part.sum() / max(1, len(part)) for part in parts]
    for ratio, values in {"sequence": sums, "sequence_mean": means}.items():
        np.testing.assert_allclose(response_log_ratios(d, lengths, ratio), np.repeat(values, lengths), rtol=1e-12)
        # Two ranks have every other token each, and add up what they have.
        even = [np.arange(len(part)) % 2 == 0 for part in parts]
        for mine in (even, [~e for e in even]):
            others = [[part[~m].sum(), (~m).sum()] for part, m in zip(parts, mine, strict=True)]
            counts = np.array([m.sum() for m in mine])
            share = torch.tensor(d[np.concatenate(mine)])
            got = response_log_ratios(share, torch.tensor(counts), ratio, lambda t, o=others: t.add_(torch.tensor(o).T))
            np.testing.assert_allclose(got, np.repeat(values, counts), rtol=1e-12)
    assert len(response_log_ratios(np.zeros(0), np.zeros(0, int), "sequence")) == 0
