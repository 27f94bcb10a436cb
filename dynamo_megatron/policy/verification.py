"""A checkpoint's bytes against the checksums that were saved with them, before any rank loads it."""

from __future__ import annotations

from pathlib import Path

from dynamo_megatron.checkpoint_folder import altered, has_checksums
from dynamo_megatron.policy.layout import Layout


def verify_bytes(folder: Path, layout: Layout) -> bool:
    """Each rank reads a share of the files; collective over all ranks. Returns False where no checksums were saved.

    Raises ValueError, the same on every rank, naming the file and what to do."""
    found = layout.gather(altered(folder, layout.rank, layout.world_size))
    if damaged := [why for why in found if why is not None]:
        raise ValueError(damaged[0])
    return has_checksums(folder)
