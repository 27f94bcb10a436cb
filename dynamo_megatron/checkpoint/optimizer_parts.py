"""The optimizer's state as parts of whole tensors that every rank writes by itself, without gathering them.

Megatron's distributed optimizer has, of each parameter that crosses a rank's share of a buffer, a run of consecutive
elements. Its format `fully_reshardable` stores whole tensors, for which Megatron gathers the runs on one rank. But the
files may divide a tensor into any boxes, and a run of elements is a few boxes: the end of a row, whole rows, the
beginning of a row. The names, shapes and readers of the tensors are those of `fully_reshardable`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import MegatronOptimizer

STORED = (ShardedTensor, ShardedTensorFactory)
GATHERS = "sharded_param_state_fully_reshardable"  # the method of Megatron's optimizer that gathers


@contextmanager
def without_gathering(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Inside, `optimizer.sharded_state_dict` for a save in the format `fully_reshardable` has each rank's own parts, as
    views of the optimizer's state, and communicates none of it."""
    with ExitStack() as stack:
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            if not part.is_stub_optimizer:
                assert callable(getattr(part, GATHERS, None)), f"megatron-core moved {GATHERS}"
                setattr(part, GATHERS, partial(_parts, part))
                stack.callback(delattr, part, GATHERS)
        yield


def _parts(optimizer: MegatronOptimizer, model: dict, is_loading: bool, metadata: dict) -> dict[int, Any]:
    """This rank's parts by parameter and name of the state; the arguments are those of the method it replaces."""
    assert not is_loading
    stored_as = {base.data: base for base in nested_values(model) if isinstance(base, STORED)}
    parts: dict[int, Any] = {}
    for buffer in optimizer.gbuf_ranges:
        for bucket in (bucket for of_dtype in buffer.values() for bucket in of_dtype):
            for parameter, ranges in bucket["param_map"].items():
                held = ranges["param"]
                state = optimizer._get_main_param_and_optimizer_states(parameter)
                parts[len(parts)] = {
                    name: list(_of_run(stored_as[parameter], name, values, held.start, optimizer))
                    for name, values in state.items()
                    if name != "step"  # in the optimizer's groups
                }
    return parts


def _of_run(
    whole: ShardedTensor | ShardedTensorFactory,
    name: str,
    values: torch.Tensor,
    start: int,
    optimizer: MegatronOptimizer,
) -> Iterator[ShardedTensor]:
    """The parts of the state `name` of which this rank has `values`: the run of elements from `start` on of a parameter
    that is stored as `whole`."""
    # The first rank with the same parameters, but for those that share this run's buffer, writes.
    replica = (*whole.replica_id[:2], optimizer.distributed_optimizer_instance_id)
    named = replace(whole, key=f"optimizer.state.{name}.{whole.key}", replica_id=replica)
    stored = list(nested_values({"": named.build()})) if isinstance(named, ShardedTensorFactory) else [named]
    for tensor in stored:
        if not isinstance(tensor, ShardedTensor):
            continue
        view = tensor.data
        assert view.is_contiguous() and view.untyped_storage().data_ptr() == whole.data.untyped_storage().data_ptr(), (
            f"{tensor.key} is not stored as a part of its parameter"
        )
        first = view.storage_offset() - whole.data.storage_offset()
        begin, end = max(start, first), min(start + values.numel(), first + view.numel())
        done = begin
        for offset, sizes in boxes(tuple(view.shape), begin - first, max(begin, end) - first):
            count = math.prod(sizes)
            yield _box(tensor, values[done - start : done - start + count], offset, sizes)
            done += count


def _box(whole: ShardedTensor, values: torch.Tensor, offset: tuple[int, ...], sizes: tuple[int, ...]) -> ShardedTensor:
    """The part of `whole` with these `values`, at `offset` from where it begins."""
    axes = whole.prepend_axis_num
    local = (1,) * axes + sizes
    return replace(
        whole,
        data=values.view(local),
        dtype=values.dtype,
        local_shape=local,
        global_offset=tuple(a + b for a, b in zip(whole.global_offset, (0,) * axes + offset, strict=True)),
        axis_fragmentations=None,  # no regular grid
        prepend_axis_num=0,
    )


def boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Divides the elements [begin, end) of a row-major tensor into boxes: at most 2 d - 1 for d dimensions. Yields
    (offset, sizes) in the elements' order."""
    if begin >= end:
        return
    if len(shape) <= 1:
        yield (begin,) * len(shape), (end - begin,) * len(shape)
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # the whole rows
    if begin < first * row:
        yield from _in_row(shape, first - 1, begin, min(end, first * row))
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    if last >= first and last * row < end:
        yield from _in_row(shape, last, last * row, end)


def _in_row(
    shape: tuple[int, ...], row: int, begin: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    size = math.prod(shape[1:])
    for offset, sizes in boxes(shape[1:], begin - row * size, end - row * size):
        yield (row, *offset), (1, *sizes)
