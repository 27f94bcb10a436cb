"""What docs/kernels.md says of a custom loss's cost: GEMMs of the head, counted."""

import pytest
import torch

from dynamo_megatron.config import PolicyLossConfig
from dynamo_megatron.kernels import chunked, policy_loss, token_logprobs

TOKENS, HIDDEN, VOCAB, CHUNK = 50, 8, 30, 20


@pytest.fixture
def gemms(monkeypatch) -> list[str]:
    """One entry a chunk and GEMM."""
    made: list[str] = []
    for name in ("_product", "_add_product_"):
        stock = getattr(chunked, name)

        def counted(*arguments, stock=stock, name=name):
            made.append(name)
            return stock(*arguments)

        monkeypatch.setattr(chunked, name, counted)
    return made


def test_gemms_of_the_fused_loss_and_of_a_custom_one(gemms):
    torch.manual_seed(0)
    hidden, weight = torch.randn(TOKENS, HIDDEN), torch.randn(VOCAB, HIDDEN)
    labels, advantages = torch.randint(0, VOCAB, (TOKENS,)), torch.randn(TOKENS)
    old, weights = torch.full((TOKENS,), -3.0), torch.full((TOKENS,), 1 / TOKENS)
    gradients = []
    for custom, count in ((False, 3), (True, 4)):
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if custom:
            logprobs = token_logprobs(x, w, labels, chunk_tokens=CHUNK).logprobs
            ratio = (logprobs - old).exp()
            (weights * torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))).sum().backward()
        else:
            policy_loss(x, w, labels, advantages, old, weights, PolicyLossConfig(), chunk_tokens=CHUNK).loss.backward()
        gradients.append((x.grad, w.grad))
        assert len(gemms) == 3 * count  # of three chunks
        gemms.clear()
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)
