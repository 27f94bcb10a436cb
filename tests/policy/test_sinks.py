"""Attention sinks: PackedAttention against a few lines in float64, forward and backward."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dynamo_megatron.policy import varlen
from dynamo_megatron.policy.attention import PackedAttention, SegmentPlan, Segments

LENGTHS = [5, 40, 1, 40, 17]
WINDOW = 16
SCALE = 1 / math.sqrt(8)
ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


def scores(q, k, window):
    """[heads, n, n]"""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
    return (torch.einsum("qhd,khd->hqk", q, k) * SCALE).masked_fill((distance < 0) | (distance >= window), -math.inf)


def check(output, given, upstream, lengths, window):
    """`given`: q, k, v, sinks"""
    expected = []
    for q, k, v in zip(*(x.split(lengths) for x in given[:3]), strict=True):
        sinks = given[3][:, None, None].expand(-1, len(q), 1)
        probabilities = torch.cat([sinks, scores(q, k, window)], dim=-1).softmax(-1)[..., 1:]
        expected.append(torch.einsum("hqk,khd->qhd", probabilities, v.repeat_interleave(3, dim=1)).flatten(1))
    expected = torch.cat(expected)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(result, given, upstream) for result in (output, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


@pytest.fixture
def given():
    """[q, k, v, sinks], and a gradient of the output"""
    tokens, generator = sum(LENGTHS), torch.Generator().manual_seed(0)
    shapes = ((tokens, 6, 8), (tokens, 2, 8), (tokens, 2, 8), (6,), (tokens, 48))
    *inputs, upstream = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [x.requires_grad_() for x in inputs], upstream


@pytest.mark.parametrize(("layer", "window"), [(1, WINDOW), (2, math.inf)])
def test_attention_with_sinks(given, layer, window):
    config = {"attention_dropout": 0.0, "kv_channels": 8, "params_dtype": torch.float64, "num_attention_heads": 6}
    config |= {"softmax_type": "learnable", "window_size": (WINDOW - 1, 0), "window_attn_skip_freq": 2}
    groups = SimpleNamespace(cp=ALONE, tp=ALONE)
    attention = PackedAttention(SimpleNamespace(**config), layer, pg_collection=groups)
    packed = Segments(plan=SegmentPlan.of(np.array(LENGTHS), 0, 1, torch.device("cpu"), WINDOW))
    (q, k, v, sinks), upstream = given
    attention.softmax_offset.data.copy_(sinks)
    output = attention(q, k, v, None, packed_seq_params=packed)
    check(output, [q, k, v, attention.softmax_offset], upstream, LENGTHS, window)


@pytest.mark.parametrize("window", [WINDOW, math.inf])
def test_the_gpu_kernels_backward_pass_is_right_with_sinks(given, window, monkeypatch):
    """The kernel's arithmetic, of one segment, in float64."""

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
    (q, k, v, sinks), upstream = given
    output = varlen.attend(q, k, v, (torch.tensor([0, len(q)]), len(q)), SCALE, (-1, 0), sinks)
    check(output.flatten(1), [q, k, v, sinks], upstream, [len(q)], window)
