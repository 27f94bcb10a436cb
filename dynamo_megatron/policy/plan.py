"""Which rollouts go into which micro-batch of which data-parallel rank. Pure Python.

Policy: the longest rollouts first, each to the data-parallel rank with the fewest tokens so far; on a rank, first fit
into micro-batches of at most `budget` tokens.
Invariants: every rollout is in exactly one micro-batch; a rollout longer than the budget has a micro-batch to itself;
every rank has the same number of micro-batches (some may be empty, none if there is nothing at all); rollouts within
a micro-batch are in ascending order; the plan is a function of the lengths alone.
"""

from __future__ import annotations

from collections.abc import Sequence


def plan_micro_batches(lengths: Sequence[int], dp_size: int, budget: int) -> list[list[list[int]]]:
    """`plan[dp_rank][micro_batch]` = indices of rollouts; `lengths` and `budget` in tokens."""
    shares: list[list[int]] = [[] for _ in range(dp_size)]
    loads = [0] * dp_size
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = min(range(dp_size), key=lambda r: (loads[r], r))
        shares[rank].append(index)
        loads[rank] += lengths[index]
    plan = [_first_fit(share, lengths, budget) for share in shares]
    count = max(len(micro_batches) for micro_batches in plan)
    return [micro_batches + [[]] * (count - len(micro_batches)) for micro_batches in plan]


def _first_fit(indices: list[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for index in indices:
        k = next((k for k, free in enumerate(room) if lengths[index] <= free), len(bins))
        if k == len(bins):
            bins.append([])
            room.append(budget)
        bins[k].append(index)
        room[k] -= lengths[index]
    return [sorted(b) for b in bins]
