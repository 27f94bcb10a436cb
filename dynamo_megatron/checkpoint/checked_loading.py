"""Strategies for Megatron's checkpoint loading whose readers neither import nor call anything that the files name.

Megatron's own strategies unpickle `.metadata` and the objects among the parts without restriction. The strategies here
read the same files with `TorchDistReader`, and only once, so that exactly the checked data is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as torch_checkpoint
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, StateDict
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME, TorchCommonLoadStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    TorchDistLoadShardedStrategy,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import Metadata, StorageReader
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from dynamo_megatron.checkpoint.torch_dist import DAMAGED, TorchDistReader, load_plain
from dynamo_megatron.errors import InputError
from dynamo_megatron.runtime.plain_text import on_one_line


class CheckedCommon(TorchCommonLoadStrategy):
    """Reads `common.pt`, which may have only plain data and tensors. Raises ValueError for any other content."""

    def load_common(self, checkpoint_dir: str | Path) -> StateDict:
        file = Path(checkpoint_dir) / COMMON_STATE_FNAME
        try:
            with open(file, "rb") as stream:
                common = load_plain(stream)
        except DAMAGED as error:
            raise InputError(f"{file}: cannot be read ({on_one_line(str(error), 200)})") from None
        if not isinstance(common, dict):
            raise InputError(f"{file}: holds no dictionary")
        return common


class CheckedParts(TorchDistLoadShardedStrategy):
    """Reads the tensors' parts in one checkpoint folder. Raises ValueError as TorchDistReader."""

    def __init__(self, folder: Path):
        super().__init__()
        self._source = TorchDistReader(folder)

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path) -> StateDict:
        tensors = [t for t in nested_values(sharded_state_dict) if isinstance(t, ShardedTensor)]
        planner = MCoreLoadPlanner(
            shapes_validation_sharded_tensors=[t for t in tensors if not t.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={t.key: t for t in tensors if t.allow_shape_mismatch},
        )
        named, flat_mapping, rename_mapping = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        target = mcore_to_pyt_state_dict(named, True)
        torch_checkpoint.load_state_dict(target, _Reader(self._source), planner=planner)
        loaded = {key: _unwrap_pyt_sharded_tensor(value) for key, value in target.items()}
        loaded = _replace_sharded_keys_with_state_dict_keys(loaded, flat_mapping, rename_mapping)
        _restore_dict_types(loaded, sharded_state_dict)
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
