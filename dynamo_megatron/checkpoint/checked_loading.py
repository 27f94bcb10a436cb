"""Loads Megatron's distributed checkpoints with readers that neither import nor call anything that the files name.

Megatron's own loader unpickles `.metadata` and the objects among the parts without restriction. The functions here read
the same files with `TorchDistReader`, and only once, so that exactly the checked data is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as torch_checkpoint
from megatron.core.dist_checkpointing.dict_utils import merge, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
    apply_factory_merges,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import Metadata, StorageReader
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from dynamo_megatron.checkpoint.torch_dist import COMMON_FILE, DAMAGED, TorchDistReader, load_plain
from dynamo_megatron.errors import InputError
from dynamo_megatron.runtime.plain_text import on_one_line

# Where Megatron 0.19 has the data that is no tensor; 0.16 has it in COMMON_FILE.
COMMON_PART = MetadataIndex(ShardedObject("common_state", None, (1,), (0,)).unique_key)


def load_checked(sharded: ShardedStateDict, folder: Path) -> StateDict:
    """Loads the checkpoint in `folder`, whichever version of Megatron saved it; collective over all ranks. Does what
    Megatron's `dist_checkpointing.load` does with a `sharded` state dict.

    Raises ValueError as TorchDistReader, and where a file has anything but plain data and tensors."""
    source = TorchDistReader(folder)
    loaded = _common(source)
    sharded, of_this_run, factories = load_preprocess(sharded)
    merge(loaded, of_this_run)
    stored, _ = extract_sharded_base(sharded)
    validate_sharding_integrity(determine_global_metadata(stored)[1])
    merge(loaded, _parts(stored, source))
    return apply_factory_merges(loaded, factories)


def _common(source: TorchDistReader) -> StateDict:
    """The data that is no tensor."""
    where = source.path / COMMON_FILE
    if not where.exists() and COMMON_PART in source.metadata.storage_data:
        where = source.path / source.metadata.storage_data[COMMON_PART].relative_path
        stored = source.stored(COMMON_PART)
        common = stored[0] if isinstance(stored, list) and len(stored) == 1 else None
    else:
        try:
            with open(where, "rb") as stream:
                common = load_plain(stream)
        except DAMAGED as error:
            raise InputError(f"{where}: cannot be read ({on_one_line(str(error), 200)})") from None
    if not isinstance(common, dict):
        raise InputError(f"{where}: holds no dictionary of common data")
    return common


def _parts(sharded: ShardedStateDict, source: TorchDistReader) -> StateDict:
    """The tensors and objects of `sharded`."""
    tensors = [t for t in nested_values(sharded) if isinstance(t, ShardedTensor)]
    planner = MCoreLoadPlanner(
        shapes_validation_sharded_tensors=[t for t in tensors if not t.allow_shape_mismatch],
        allow_shape_mismatch_sharded_tensors={t.key: t for t in tensors if t.allow_shape_mismatch},
    )
    named, flat_mapping, rename_mapping = _replace_state_dict_keys_with_sharded_keys(sharded)
    target = mcore_to_pyt_state_dict(named, True)
    torch_checkpoint.load_state_dict(target, _Reader(source), planner=planner)
    loaded = {key: _unwrap_pyt_sharded_tensor(value) for key, value in target.items()}
    loaded = _replace_sharded_keys_with_state_dict_keys(loaded, flat_mapping, rename_mapping)
    _restore_dict_types(loaded, sharded)
    return loaded


class _Reader(StorageReader):
    def __init__(self, source: TorchDistReader):
        self._source = source

    def read_metadata(self) -> Metadata:
        return self._source.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            index = item.storage_index
            if item.type == LoadItemType.BYTE_IO:
                # Not the planner's load_bytes, which unpickles without restriction.
                path = planner.mappings[item.dest_index.fqn]
                set_element(planner.original_state_dict, path, self._source.stored(index))
                continue
            tensor = narrow_tensor_by_index(self._source.part(index), item.storage_offsets, item.lengths)
            target = planner.resolve_tensor(item).detach()
            assert target.size() == tensor.size(), f"{index}: {target.size()}, {tensor.size()}"
            target.copy_(tensor)
            planner.commit_tensor(item, target)
        done: Future = Future()
        done.set_result(None)
        return done

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False
