"""Checkpoints of a run: Megatron's distributed format, loadable under any other layout, plus rank 0's own state.

A checkpoint is a folder `checkpoints/step-NNNNNN` that appears, by a rename, only when it is complete: a kill or a full
disk during a save loses at most that save. No random state is stored: nothing in a step draws random numbers (no
dropout), and the prompt stream's order is a function of its own seed and position.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException

from dynamo_megatron.output_dir import STATE_FILE, complete_checkpoints
from dynamo_megatron.policy.policy import Policy


class _SynchronousSave(TorchDistSaveShardedStrategy):
    """The torch_dist format written by the rank itself: Megatron's writer leaves a helper process per rank behind."""

    def save(self, sharded_state_dict, checkpoint_dir):
        named, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        try:
            torch_checkpoint.save(
                mcore_to_pyt_state_dict(named, False),
                storage_writer=torch_checkpoint.FileSystemWriter(checkpoint_dir, thread_count=1, sync_files=True),
                planner=MCoreSavePlanner(
                    dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
                ),
            )
        except CheckpointException as error:  # a BaseException, with every rank's own failure in it
            causes = [line.strip() for line in str(error).splitlines() if "Error: " in line]
            raise OSError(f"{checkpoint_dir}: not saved: {causes[-1] if causes else error}") from None


def _sharded_state(policy: Policy, *, loading: bool) -> tuple[dict, dict]:
    format_of = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
    groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    model = {
        f"model{i}": chunk.sharded_state_dict(metadata={**format_of, **groups}) for i, chunk in enumerate(policy.chunks)
    }
    optimizer = policy.optimizer.sharded_state_dict(model, is_loading=loading, metadata={**format_of, **groups})
    return {**model, "optimizer": optimizer}, format_of


def save_checkpoint(policy: Policy, root: Path, step: int, state: dict | None, keep_last: int) -> Path:
    """Saves step `step` under `root`; collective over all ranks. `state` (plain data) is rank 0's, None elsewhere.

    The oldest checkpoints beyond `keep_last` are removed afterwards. Raises OSError where the disk is full.
    """
    final, aside = root / f"step-{step:06d}", root / f".step-{step:06d}.unfinished"
    first = policy.layout.rank == 0
    if first:
        for unfinished in root.glob(".step-*.unfinished"):
            shutil.rmtree(unfinished)
        aside.mkdir(parents=True)
    dist.barrier(group=policy.layout.host)
    sharded, metadata = _sharded_state(policy, loading=False)
    dist_checkpointing.save(sharded, str(aside), _SynchronousSave("torch_dist", 1), content_metadata=metadata)
    dist.barrier(group=policy.layout.host)
    if first:
        with open(aside / STATE_FILE, "w", encoding="utf-8") as file:
            json.dump(state, file)
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
        for _, old in complete_checkpoints(root)[:-keep_last]:
            shutil.rmtree(old)
    dist.barrier(group=policy.layout.host)
    return final


def load_state(folder: Path) -> dict:
    """Rank 0's state of a checkpoint. Raises ValueError where it cannot be read."""
    try:
        return json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder / STATE_FILE}: {error}") from None


def load_checkpoint(policy: Policy, folder: Path, *, optimizer: bool = True) -> None:
    """Loads the weights and, if asked to, the optimizer, whatever layout saved them; collective over all ranks."""
    sharded, _ = _sharded_state(policy, loading=True)
    if not optimizer:
        del sharded["optimizer"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # Megatron's use of torch, which no user can change
        loaded = dist_checkpointing.load(sharded, str(folder))
    for i, chunk in enumerate(policy.chunks):
        chunk.load_state_dict(loaded[f"model{i}"])
    if optimizer:
        policy.optimizer.load_state_dict(loaded["optimizer"])
    torch.cuda.synchronize()
