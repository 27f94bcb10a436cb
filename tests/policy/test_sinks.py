"""Attention sinks in one call on a GPU, against a few lines in float64. tests/bridge has GPT-OSS without that call."""

import math

import pytest
import torch

from dynamo_megatron.policy import varlen

SCALE = 1 / math.sqrt(8)


def scores(q, k, window):
    """[heads, n, n]"""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
    return (torch.einsum("qhd,khd->hqk", q, k) * SCALE).masked_fill((distance < 0) | (distance >= window), -math.inf)


@pytest.mark.parametrize("window", [16, math.inf])
def test_the_gpu_kernels_backward_pass_is_right_with_sinks(window, monkeypatch):
    """The kernel's arithmetic, of one segment, in float64."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((40, 6, 8), (40, 2, 8), (40, 2, 8), (6,), (40, 48))
    *given, upstream = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    q, k, v, sinks = (x.requires_grad_() for x in given)

    def forward(q, k, v, *_, return_aux, **__):
        s = scores(q, k, window)
        return torch.einsum("hqk,khd->qhd", s.softmax(-1), v.repeat_interleave(3, dim=1)), s.logsumexp(-1)

    def backward(gradient, q, k, v, output, lse, *_, **__):
        p = (scores(q, k, window) - lse[..., None]).exp()
        dp = torch.einsum("qhd,khd->hqk", gradient, v.repeat_interleave(3, dim=1))
        ds = p * (dp - (gradient * output).sum(-1).t()[..., None]) * SCALE
        of_q = torch.einsum("hqk,khd->qhd", ds, k.repeat_interleave(3, dim=1))
        of_kv = torch.einsum("hqk,qhd->khd", ds, q), torch.einsum("hqk,qhd->khd", p, gradient)
        return of_q, *(x.unflatten(1, (2, 3)).sum(2) for x in of_kv)

    monkeypatch.setattr(varlen, "varlen_attn", forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)
    output = varlen.attend(q, k, v, (torch.tensor([0, len(q)]), len(q)), SCALE, (-1, 0), sinks).flatten(1)
    of_sinks = sinks[:, None, None].expand(-1, len(q), 1)
    probabilities = torch.cat([of_sinks, scores(q, k, window)], dim=-1).softmax(-1)[..., 1:]
    expected = torch.einsum("hqk,khd->qhd", probabilities, v.repeat_interleave(3, dim=1)).flatten(1)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(result, [q, k, v, sinks], upstream) for result in (output, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)
