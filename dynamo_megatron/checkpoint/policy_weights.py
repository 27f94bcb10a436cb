"""Loads a model's weights from a folder into the policy on every rank, and verifies a checkpoint's checksums."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_megatron.checkpoint.folder import UNVERIFIED, verify
from dynamo_megatron.checkpoint.torch_dist import is_torch_dist
from dynamo_megatron.checkpoint.weights import load_weights, open_weights
from dynamo_megatron.errors import InputError
from dynamo_megatron.models import ModelSpec

if TYPE_CHECKING:  # the policy loads through this module
    from dynamo_megatron.policy.layout import Layout
    from dynamo_megatron.policy.model import PolicyModel


def load_folder(chunks: Sequence[PolicyModel], spec: ModelSpec, path: str, layout: Layout) -> None:
    """Loads the weights of a Hugging Face or Megatron folder; collective over all ranks.

    Raises ValueError, the same on every rank, also where only one rank reads the faulty tensor."""
    if is_torch_dist(path) and not verify_bytes(Path(path), layout) and layout.rank == 0:
        print(f"{path}: {UNVERIFIED}", flush=True)
    failed = None
    try:
        with open_weights(path, spec) as folder:
            for chunk in chunks:
                load_weights(
                    chunk,
                    spec,
                    folder,
                    layer_offset=chunk.layer_offset,
                    tp_rank=layout.tp.rank(),
                    tp_size=layout.tp.size(),
                    ep_rank=layout.ep.rank(),
                    ep_size=layout.ep.size(),
                )
    except ValueError as error:
        failed = str(error)
    if failures := [why for why in layout.gather(failed) if why is not None]:
        raise InputError(failures[0])


def verify_bytes(folder: Path, layout: Layout, *, resume: bool = False) -> bool:
    """Runs `verify` with a share of the files on each rank; collective over all ranks. Returns False where there are no
    checksums.

    Raises ValueError, the same on every rank, naming the file and what to do."""
    verified, damaged = False, None
    try:
        verified = verify(folder, layout.rank, layout.world_size, resume=resume)
    except ValueError as error:
        damaged = str(error)
    if found := [why for why in layout.gather(damaged) if why is not None]:
        raise InputError(found[0])
    return verified
