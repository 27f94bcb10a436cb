"""Saves and loads the policy and its optimizer in Megatron's distributed format; any layout can load any other's saves.

All ranks plan a save together (`begin_save`), every rank writes its own file, and rank 0 publishes the folder
(`Save.complete`). With `background` a thread of each rank writes, from a copy in host memory and without a collective.
Megatron's own asynchronous writers are not used: their helper processes outlive a killed rank.
"""

from __future__ import annotations

import math
import os
import shutil
import threading
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, ShardedTensorFactory, StateDict
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.optimizer import MegatronOptimizer
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dynamo_megatron.checkpoint.adapters import check_base, read_lora
from dynamo_megatron.checkpoint.folder import (
    check_model,
    file_checksum,
    publish,
    read_manifest,
    unfinished_folder,
    write_state,
)
from dynamo_megatron.checkpoint.torch_dist import CRITIC, TorchDistReader, write_common
from dynamo_megatron.checkpoint.weights import verify_bytes
from dynamo_megatron.errors import InputError
from dynamo_megatron.models.adapters import is_adapter
from dynamo_megatron.runtime.plain_text import error_line

# Of a module of TransformerEngine, beside its parameters: scaling factors for training in FP8. Always empty here: the
# policy trains in model.dtype, and rollout.quantization quantises what the servers get, not these modules.
EXTRA_STATE = "._extra_state"


def _host_copy(plan: SavePlan, planner: SavePlanner) -> Any:
    """A copy of a plan's data in host memory, for the writer in place of the planner."""
    found = ((item.index, planner.resolve_data(item)) for item in plan.items)
    data = {index: x.detach().to("cpu", copy=True) if torch.is_tensor(x) else x for index, x in found}
    return SimpleNamespace(resolve_data=lambda item: data[item.index])


class _Writer(FileSystemWriter):
    """torch's writer in two halves: all ranks make the plan, and `write` writes this rank's file later."""

    def __init__(self, folder: Path, *, background: bool):
        # No copies ahead in the background: their CUDA stream would be on the thread's device, not on this rank's.
        ahead = 0 if background else 10_000_000
        super().__init__(folder, thread_count=1, per_thread_copy_ahead=ahead, sync_files=True)
        self._background = background
        self.results: list[WriteResult] = []
        self.checksums: dict[str, str] = {}  # of this rank's file, by its name
        self.error: str | None = "its writer ended without a result"

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future:
        self._plan, self._source = plan, _host_copy(plan, planner) if self._background else planner
        nothing_yet: Future = Future()
        nothing_yet.set_result([])
        return nothing_yet

    def finish(self, metadata: Metadata, results: list) -> None:
        self._metadata = metadata

    def write(self) -> None:
        try:
            self.results = super().write_data(self._plan, self._source).value()
            files = {result.storage_data.relative_path for result in self.results}
            self.checksums = {name: file_checksum(Path(self.path, name)) for name in files}
            self.error = None
        except (OSError, RuntimeError) as error:
            self.error = _cause(error)
        del self._source

    def write_metadata(self, results: list[list[WriteResult]]) -> None:
        super().finish(self._metadata, results)


class _PlannedSave(TorchDistSaveShardedStrategy):
    """A torch_dist strategy that leaves the writing of the files to `writer`."""

    def __init__(self, writer: _Writer):
        super().__init__("torch_dist", 1)
        self._writer = writer

    def save(self, sharded_state_dict, checkpoint_dir):
        named, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        planner = MCoreSavePlanner(dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False)
        torch_checkpoint.save(mcore_to_pyt_state_dict(named, False), storage_writer=self._writer, planner=planner)


class Save:
    """A save under way. All ranks have begun it together, each writes its own file, and all complete it together."""

    def __init__(self, policy: Any, folder: Path, step: int, state: dict | None, writer: _Writer, background: bool):
        self.step, self._state = step, state
        self._layout, self._folder, self._writer = policy.layout, folder, writer
        saved_by = {"ranks": policy.layout.world_size, **policy.config.parallel.model_dump()}
        self._contents = {
            "model": policy.spec.dimensions(),
            "dtype": policy.config.model.dtype,
            "layout": {**saved_by, "dp": policy.layout.dp.size()},
            "frozen": policy.frozen.digests,
        }
        if (lora := policy.config.model.lora) is not None:
            self._contents["lora"] = {**lora.model_dump(), "base": policy.base_digest}
        self._thread = threading.Thread(target=writer.write, name=f"checkpoint of step {step}", daemon=True)
        if background:
            self._thread.start()
        else:
            writer.write()

    def written(self) -> bool:
        """Returns True where this rank has written its file, or has failed to."""
        return not self._thread.is_alive()

    def complete(self, keep_last: int, timeout: float, say: Callable[[str], None] | None) -> None:
        """Waits for every rank's file and publishes the checkpoint; collective over all ranks. `say` (rank 0's, None
        elsewhere) gets warnings. Raises TimeoutError where this rank's file is not written within `timeout` seconds,
        OSError where a rank could not write; earlier checkpoints stay."""
        if not self.written():
            self._thread.join(timeout)
        if not self.written():
            raise TimeoutError(f"waited {timeout:g} s for the checkpoint of step {self.step} to be written")
        layout, first = self._layout, self._layout.rank == 0
        parts: list | None = [None] * layout.world_size if first else None
        mine = self._writer.results, self._writer.checksums, self._writer.error
        dist.gather_object(mine, parts, dst=0, group=layout.host)
        failed = layout.gather(self._publish(parts, keep_last, say) if first else None)[0]
        if failed is not None:
            raise OSError(_not_saved(self._folder.parent, self.step, failed))

    def _publish(self, parts: list[tuple], keep_last: int, say: Callable[[str], None]) -> str | None:
        """`parts`: results, checksums and error of every rank. Returns why the checkpoint was not made."""
        results, checksums, errors = zip(*parts, strict=True)
        try:
            for rank, error in enumerate(errors):
                if error is not None:
                    raise OSError(f"rank {rank}: {error}")
            write_state(self._folder, self._state)
            self._writer.write_metadata(list(results))
            publish(self._folder, self.step, self._contents, dict(ChainMap(*checksums)), keep_last, say)
        except OSError as error:
            shutil.rmtree(self._folder, ignore_errors=True)  # else its files would keep a full disk full
            return str(error)
        return None


def begin_save(
    policy: Any,
    root: Path,
    step: int,
    state: dict | None,
    *,
    background: bool,
    optimizer: bool = True,
    critic: Any | None = None,
) -> Save:
    """Begins to save step `step` under `root`; collective over all ranks. `state` (`write_state`) is rank 0's, None
    elsewhere. The weights may change as soon as this returns; `state` may not. `optimizer`: whether the optimizer's
    state is saved. `critic`: saved too, with its optimizer. Raises OSError where files cannot be written, as on a full
    disk."""
    layout, folder = policy.layout, None
    try:
        folder = layout.gather(unfinished_folder(root, step) if layout.rank == 0 else None)[0]
        writer = _Writer(folder, background=background)
        sharded, metadata = _sharded_state(policy, loading=False, optimizer=optimizer)
        if critic is not None:
            sharded |= _of_critic(critic, loading=False, optimizer=optimizer)
        # Ranks that have the same parameters share the writing: each writes a part of them.
        strategy = FullyParallelSaveStrategyWrapper(_PlannedSave(writer), layout.dp_cp)
        parts, common = save_preprocess({**sharded, "content_metadata": metadata})
        strategy.save(parts, folder)
        if layout.rank == 0:
            write_common(folder, common)
    except (OSError, RuntimeError, CheckpointException) as error:
        if layout.rank == 0 and folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        raise OSError(_not_saved(root, step, _cause(error))) from error
    return Save(policy, folder, step, state, writer, background)


def _cause(error: BaseException) -> str:
    """An error as one line: of torch's CheckpointException, which has every rank's, the first one."""
    if isinstance(error, CheckpointException):
        rank, (failure, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {_cause(failure)}"
    # On a full disk torch raises an error of its own when it closes the file.
    return error_line(error.__context__ if isinstance(error.__context__, OSError) else error, 300)


def _not_saved(root: Path, step: int, why: str) -> str:
    return f"{root}: the checkpoint of step {step} was not saved: {why}"


def load_checkpoint(policy: Any, folder: Path, *, optimizer: bool = True, critic: Any | None = None) -> None:
    """Loads the weights and, with `optimizer`, the optimizer's state, and both of a `critic`; collective over all
    ranks. Any layout may have saved them. Raises ValueError for a checkpoint that is damaged or belongs to another
    model."""
    check_model(folder, policy.spec.dimensions())
    if (lora := read_lora(folder)) is not None:
        check_base(folder, lora[1], policy.base_digest, policy.config.model.path)
    for path, saved in read_manifest(folder).get("frozen", {}).items():
        if policy.frozen.digests.get(path, saved) != saved:
            raise InputError(
                f"{path} has other weights now than when {folder} was saved, whose run uses it as reference, teacher "
                "or reward model; restore these weights, or name a new output_dir"
            )
    verify_bytes(folder, policy.layout)
    _load(policy, _sharded_state(policy, loading=True, optimizer=optimizer)[0], folder)
    if critic is not None:
        _load(critic, _of_critic(critic, loading=True, optimizer=optimizer), folder)
    torch.cuda.synchronize()


def _load(policy: Any, sharded: ShardedStateDict, folder: Path) -> None:
    """Into the policy or the critic, what `sharded` asks for."""
    try:
        loaded = load_trusted_classes(sharded, folder)
    except (ValueError, OSError, RuntimeError, CheckpointException, CheckpointingException) as error:
        why = _cause(error)
        raise InputError(f"{folder} cannot be loaded: {why}; move it away to go on from the one before it") from error
    loaded, lora = loaded["critic"] if "critic" in sharded else loaded, policy.base_digest is not None
    for i, chunk in enumerate(policy.chunks):
        wrong = chunk.load_state_dict(loaded[f"model{i}"], strict=False)
        # Extra states, and the base of adapters, are none of a checkpoint's.
        missing = (k for k in wrong.missing_keys if (is_adapter(k) if lora else EXTRA_STATE not in k))
        wrong = [*wrong.unexpected_keys, *missing]
        assert not wrong, f"{folder}: loaded with other parameters than the model's: {wrong}"
    if "optimizer" in sharded.get("critic", sharded):
        policy.optimizer.load_state_dict(loaded["optimizer"])


def load_trusted_classes(sharded: ShardedStateDict, folder: Path) -> StateDict:
    """Megatron's `dist_checkpointing.load`, which by itself unpickles whatever the files name: `.metadata` is read with
    TorchDistReader before, and torch.load is limited to tensors and plain data meanwhile."""
    TorchDistReader(folder)
    with mock.patch.dict(os.environ, TORCH_FORCE_WEIGHTS_ONLY_LOAD="1"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # caused by Megatron's use of torch
        return dist_checkpointing.load(sharded, str(folder))


def _of_critic(critic: Any, **how: bool) -> dict:
    """`_sharded_state` of the critic, under keys of its own."""
    sharded, _ = _sharded_state(critic, **how)
    add_prefix_for_sharding(sharded, CRITIC)
    return {"critic": sharded}


def _sharded_state(policy: Any, *, loading: bool, optimizer: bool) -> tuple[dict, dict]:
    format_of = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": True,  # a load takes no memory of the GPU
        "chained_optim_avoid_prefix": True,
    }
    metadata = {**format_of, "dp_cp_group": policy.layout.dp_cp}
    model = {f"model{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(policy.chunks)}
    moments = {}
    if optimizer and loading:
        moments["optimizer"] = policy.optimizer.sharded_state_dict(model, is_loading=True, metadata=metadata)
    elif optimizer:
        _begin_moments(policy)
        with without_gathering(policy.optimizer):
            moments["optimizer"] = policy.optimizer.sharded_state_dict(model, metadata=metadata)
    if loading:  # only TransformerEngine's modules have an extra state; a run may resume with or without them
        model = {name: {k: v for k, v in part.items() if EXTRA_STATE not in k} for name, part in model.items()}
    return {**model, **moments}, format_of


def _begin_moments(policy: Any) -> None:
    """Initialises the moments and step counts of fused Adam optimizers. A fused Adam creates them in its first step,
    but Megatron saves them unconditionally, and there may have been no step: all updates may have been skipped. For
    torch's Adam see `fix_torch_adam_checkpoints`."""
    for part in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]):
        if part.is_stub_optimizer or isinstance(part.optimizer, torch.optim.Adam):
            continue
        part.init_state_fn(part.optimizer, part.config)
        for group in part.optimizer.param_groups:
            group.setdefault("step", 0)


# -- the optimizer's state ---------------------------------------------------------------------------------------------
STORED = (ShardedTensor, ShardedTensorFactory)
GATHERS = "sharded_param_state_fully_reshardable"  # the method of Megatron's optimizer that gathers


@contextmanager
def without_gathering(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Inside, `optimizer.sharded_state_dict` for a save in the format `fully_reshardable` has each rank's own parts, as
    views of the optimizer's state, and communicates none of it.

    A rank has runs of consecutive elements of parameters. The format stores whole tensors, for which Megatron gathers
    the runs on one rank. But files may divide a tensor into any boxes, and a run is a few of them.
    """
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
        axes = tensor.prepend_axis_num
        for offset, sizes in boxes(tuple(view.shape), begin - first, max(begin, end) - first):
            local, count = (1,) * axes + sizes, math.prod(sizes)
            yield replace(
                tensor,
                data=values[done - start : done - start + count].view(local),
                dtype=values.dtype,
                local_shape=local,
                global_offset=tuple(a + b for a, b in zip(tensor.global_offset, (0,) * axes + offset, strict=True)),
                axis_fragmentations=None,  # no regular grid
                prepend_axis_num=0,
            )
            done += count


def boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Divides the elements [begin, end) of a row-major tensor into boxes: at most 2 d - 1 for d dimensions. Yields
    (offset, sizes) in the elements' order."""
    if len(shape) <= 1:
        if begin < end:
            yield (begin,) * len(shape), (end - begin,) * len(shape)
        return
    row = math.prod(shape[1:])
    while begin < end:
        first, within = divmod(begin, row)
        if not within and (rows := (end - begin) // row):
            yield (first, *(0,) * (len(shape) - 1)), (rows, *shape[1:])
            begin += rows * row
            continue
        stop = min(end, (first + 1) * row)
        for offset, sizes in boxes(shape[1:], within, stop - first * row):
            yield (first, *offset), (1, *sizes)
        begin = stop
