"""Which sequences go into which micro-batch of which data-parallel rank. Pure Python.

The number of micro-batches is the smallest that the token budget allows, rounded up to a multiple of ranks times
`multiple`. Sequences are placed in order of falling cost, each in the cheapest micro-batch that has room for it; one
that is longer than the budget is alone in its own. Micro-batches are then dealt out by falling cost, so that the k-th
ones of all ranks, which run at the same time, cost about the same. Every rank gets the same number of micro-batches,
some of them possibly empty: the pipeline and the collectives still run them. The assignment is a function of the
lengths alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynamo_megatron.models import ModelSpec


@dataclass(frozen=True)
class SequenceCost:
    """The cost of a sequence of L tokens, in multiply-adds of a forward pass: `linear * L + quadratic * L^2`."""

    linear: float
    quadratic: float

    @classmethod
    def of_model(cls, spec: ModelSpec) -> SequenceCost:
        """Projections, MLP (the chosen experts') and head of every token; causal attention over the tokens before."""
        heads = spec.num_attention_heads * spec.kv_channels
        attention = spec.hidden_size * (2 * heads + 2 * spec.num_query_groups * spec.kv_channels)
        widths = spec.router_topk * spec.moe_ffn_hidden_size if spec.num_experts else spec.ffn_hidden_size
        layer = attention + 3 * spec.hidden_size * widths
        # Two products (with keys and with values), each over half the square.
        return cls(spec.num_layers * layer + spec.vocab_size * spec.hidden_size, spec.num_layers * heads)

    def __call__(self, length: int) -> float:
        return self.linear * length + self.quadratic * length * length


def assign_micro_batches(
    lengths: Sequence[int], dp_size: int, budget: int, *, cost: SequenceCost, multiple: int = 1
) -> list[list[list[int]]]:
    """`assigned[dp_rank][micro_batch]` = indices of sequences; `lengths` and `budget` in tokens.

    `multiple`: a divisor that the number of micro-batches of a rank must have; the interleaved pipeline schedule of
    Megatron-core needs the number of stages.
    """
    if not lengths:
        return [[] for _ in range(dp_size)]
    costs = [cost(length) for length in lengths]
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    step = dp_size * multiple
    count = step * max(1, -(-sum(min(length, budget) for length in lengths) // (budget * step)))
    while (bins := _spread(order, lengths, costs, count, budget)) is None:
        count += step
    bins.sort(key=lambda b: (-sum(costs[i] for i in b), b))
    assigned: list[list[list[int]]] = [[] for _ in range(dp_size)]
    loads = [0.0] * dp_size
    for start in range(0, count, dp_size):
        ranks = sorted(range(dp_size), key=lambda r: (loads[r], r))
        for rank, members in zip(ranks, bins[start : start + dp_size], strict=True):
            assigned[rank].append(members)
            loads[rank] += sum(costs[i] for i in members)
    return assigned


def _spread(
    order: Sequence[int], lengths: Sequence[int], costs: Sequence[float], count: int, budget: int
) -> list[list[int]] | None:
    """Puts the sequences, in this order, each into the cheapest of `count` micro-batches with room. None: no room."""
    bins: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    cheapest = [(0.0, b) for b in range(count)]  # a heap
    shortest = lengths[order[-1]]
    for i in order:
        full = []
        while cheapest and bins[cheapest[0][1]] and tokens[cheapest[0][1]] + lengths[i] > budget:
            entry = heapq.heappop(cheapest)
            if tokens[entry[1]] + shortest <= budget:
                full.append(entry)
        if not cheapest:
            return None
        load, b = cheapest[0]
        bins[b].append(i)
        tokens[b] += lengths[i]
        heapq.heapreplace(cheapest, (load + costs[i], b))
        for entry in full:
            heapq.heappush(cheapest, entry)
    return [sorted(b) for b in bins]
