"""Attention of packed sequences on a GPU without TransformerEngine: torch's one call against one for each length."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dynamo_megatron.policy.attention import PackedAttention, SegmentPlan, Segments


@pytest.mark.parametrize("window", [None, (15, 0)])
@pytest.mark.parametrize("sinks", ["vanilla", "learnable"])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_one_call_gives_what_a_call_for_each_length_gives(window, sinks):
    lengths, device = np.array([5, 300, 1, 300, 64]), torch.device("cuda")
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    config = {"attention_dropout": 0.0, "kv_channels": 64, "params_dtype": torch.bfloat16}
    config |= {"softmax_type": sinks, "num_attention_heads": 6, "window_size": window, "window_attn_skip_freq": [1]}
    groups = SimpleNamespace(cp=alone, tp=alone)
    attention = PackedAttention(SimpleNamespace(**config), 1, pg_collection=groups).to(device)
    assert attention.at_once
    generator = torch.Generator(device).manual_seed(0)
    if sinks == "learnable":
        attention.softmax_offset.data.normal_(generator=generator)
    by_length = copy.deepcopy(attention).float()
    by_length.at_once = False
    ends = torch.tensor(np.append(0, lengths.cumsum()), dtype=torch.int32, device=device)
    packed = Segments(cu_seqlens_q=ends, max_seqlen_q=300, plan=SegmentPlan.of(lengths, 0, 1, device, 16))
    q, k, v = (torch.randn(670, n, 64, generator=generator, device=device) for n in (6, 2, 2))
    upstream = torch.randn(670, 6 * 64, generator=generator, device=device)

    def run(layer, dtype):
        given = [x.to(dtype).requires_grad_() for x in (q.clone(), k.clone(), v.clone())]
        out = layer(*given, None, packed_seq_params=packed)
        gradients = torch.autograd.grad(out, [*given, *layer.parameters()], upstream.to(dtype))
        return [x.float() for x in (out.detach(), *gradients)]

    exact, names = run(by_length, torch.float32), ("output", "q", "k", "v", "sinks")
    for name, got, want in zip(names[: len(exact)], run(attention, torch.bfloat16), exact, strict=True):
        assert (got - want).norm() <= 1e-2 * want.norm(), name
