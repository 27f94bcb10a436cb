"""The invariants of the assignment to micro-batches and of packing, over random lengths."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_megatron.models import load_model_config
from dynamo_megatron.policy.batch import MicroBatch, SequenceCost, assign_micro_batches
from dynamo_megatron.types import Sequences

LENGTHS = st.lists(st.integers(1, 300), max_size=60)
COST = SequenceCost(linear=1000.0, quadratic=10.0)


@settings(max_examples=300, deadline=None)
@given(LENGTHS, st.integers(1, 9), st.integers(1, 700), st.integers(1, 4))
def test_every_sequence_has_one_place_and_every_rank_as_many_micro_batches(lengths, dp_size, budget, multiple):
    assigned = assign_micro_batches(lengths, dp_size, budget, cost=COST, multiple=multiple)
    assert sorted(i for rank in assigned for micro in rank for i in micro) == list(range(len(lengths)))
    assert len(assigned) == dp_size and len({len(rank) for rank in assigned}) == 1
    assert len(assigned[0]) % multiple == 0 and bool(assigned[0]) == bool(lengths)
    for micro in (micro for rank in assigned for micro in rank):
        assert micro == sorted(micro)
        assert len(micro) <= 1 or sum(lengths[i] for i in micro) <= budget


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(1, 6))
def test_cost_is_balanced_within_the_costliest_sequence(lengths, dp_size):
    assigned = assign_micro_batches(lengths, dp_size, sum(lengths), cost=COST)
    costs = [[sum(COST(lengths[i]) for i in micro) for micro in rank] for rank in assigned]
    worst = max(COST(length) for length in lengths)
    of_micro_batches = [c for rank in costs for c in rank]
    assert max(of_micro_batches) - min(of_micro_batches) <= worst * (1 + 1e-9)
    of_ranks = [sum(rank) for rank in costs]
    assert max(of_ranks) - min(of_ranks) <= worst * (1 + 1e-9)


def test_nearly_as_few_micro_batches_as_the_budget_allows():
    lengths = np.random.default_rng(0).integers(50, 2000, 2000).tolist()
    count = len(assign_micro_batches(lengths, 8, 16384, cost=COST)[0])
    assert count <= 1.1 * sum(lengths) / (8 * 16384) + 1


def test_the_cost_is_the_model_s(tiny_model):
    cost = SequenceCost.of_model(load_model_config(tiny_model))
    weights = 2 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128) + 128 * 64
    assert cost.linear == weights and cost.quadratic == 2 * 64


SEQUENCES = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 30)), max_size=8)


@settings(max_examples=100, deadline=None)
@given(SEQUENCES, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_context_parallel_ranks_share_every_label_once_and_padding_none(shapes, cp_size, multiple):
    generator = np.random.default_rng(0)
    lengths = np.asarray([p + r for p, r in shapes], np.int64)
    tokens, offsets = generator.integers(1, 1000, int(lengths.sum())), np.append(0, lengths.cumsum())
    source = Sequences(["a"] * len(shapes), tokens, offsets, np.asarray([p for p, _ in shapes], np.int64))
    given = {"multiple": multiple, "device": torch.device("cpu"), "cp_size": cp_size}
    parts = [MicroBatch.pack(source, list(range(len(shapes))), cp_rank=rank, **given) for rank in range(cp_size)]
    total = int(parts[0].cu_seqlens[-1])
    if cp_size > 1:
        assert all(int(n) % (2 * cp_size) == 0 for n in parts[0].cu_seqlens.diff())
    found: dict[int, tuple[int, int]] = {}
    for part in parts:
        assert torch.equal(part.cu_seqlens, parts[0].cu_seqlens)
        assert part.tokens.shape == part.positions.shape == (1, total // cp_size)
        assert part.tokens.shape[1] % multiple == 0 and part.tokens.shape[1] > 0
        assert part.response_bounds[-1] == len(part.rows) == len(part.labels) == len(part.slots)
        for row, label, slot in zip(part.rows.tolist(), part.labels.tolist(), part.slots.tolist(), strict=True):
            assert slot not in found
            found[slot] = (int(part.tokens[0, row]), label)
    expected = [
        (int(source.tokens[o + t - 1]), int(source.tokens[o + t]))
        for o, (p, r) in zip(source.offsets, shapes, strict=False)
        for t in range(p, p + r)
    ]
    assert [found[slot] for slot in range(len(expected))] == expected and len(found) == len(expected)
