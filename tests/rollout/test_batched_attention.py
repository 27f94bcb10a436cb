"""Attention of the CPU servers: a batch of short sequences is attended to in one call."""

import runpy

import pytest
import torch

from dynamo_megatron.rollout.servers.server import CPU_STAND_INS

HEADS, KEY_HEADS, SIZE, SLOTS = 4, 2, 8, 512


@pytest.fixture(scope="module")
def attention():
    return runpy.run_path(str(CPU_STAND_INS / "batched_attention.py"))["attention"]


@pytest.mark.parametrize("key_heads", [KEY_HEADS, HEADS])
@pytest.mark.parametrize("decode", [True, False])
def test_each_sequence_is_attended_to_as_if_alone(attention, decode, key_heads):
    """Sequences of 1 to 20 tokens whose keys are scattered over a cache that is NaN elsewhere."""
    generator = torch.Generator().manual_seed(0)
    seq_lens = torch.randint(1, 21, (16,), generator=generator)
    query_lens = torch.ones_like(seq_lens) if decode else (seq_lens + 1) // 2
    places = torch.randperm(SLOTS, generator=generator).split([*seq_lens.tolist(), SLOTS - int(seq_lens.sum())])
    slots = torch.full((16, 20), int(places[-1][0]))
    caches = torch.full((2, SLOTS, key_heads, SIZE), float("nan"))
    for row, own in zip(slots, places, strict=False):
        row[: len(own)] = own
        caches[:, own] = torch.randn(2, len(own), key_heads, SIZE, generator=generator)
    query = torch.randn(int(query_lens.sum()), HEADS, SIZE, generator=generator)
    found = attention(query, *caches, slots, seq_lens, query_lens, 0.3).split(query_lens.tolist())
    for own, asked, part in zip(places, query.split(query_lens.tolist()), found, strict=False):
        keys, values = (cache[own].repeat_interleave(HEADS // key_heads, 1) for cache in caches)
        scores = torch.einsum("qhd,khd->hqk", asked, keys) * 0.3
        later = torch.arange(len(own)) > torch.arange(len(own) - len(asked), len(own))[:, None]
        expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), values)
        torch.testing.assert_close(part, expected)
