"""Writes the batch that gave NaN or infinity to disk, with the weights of the pass in which it did.

`output_dir/nonfinite/step-NNNNNN` is a checkpoint folder without the optimizer, which no such pass reads: the last
checkpoint of the run may be many updates older. `replay --step` (replay/step.py) repeats the pass.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from dynamo_megatron.checkpoint.folder import checkpoint_folders
from dynamo_megatron.checkpoint.policy_state import begin_save
from dynamo_megatron.config import Config
from dynamo_megatron.config.files import to_plain
from dynamo_megatron.policy.non_finite import NonFiniteError
from dynamo_megatron.policy.policy import Policy
from dynamo_megatron.runtime.run_folder import FAILED_STEPS

PASS_FILE = "pass.pt"  # the inputs of the pass


def write_failed_step(
    policy: Policy, config: Config, step: int, error: NonFiniteError, say: Callable[[str], None] | None
) -> None:
    """Writes the folder of `step`, then removes the folders of earlier failures; collective over all ranks. `say`: rank
    0's, None elsewhere; it gets one line that names the folder. Raises OSError if the disk is full, RuntimeError if the
    save fails for another reason (memory, a collective)."""
    output = Path(config.output_dir)
    root, folder = output / FAILED_STEPS, output / FAILED_STEPS / f"step-{step:06d}"
    earlier = [other for other_step, other in checkpoint_folders(root) if other_step != step]
    state = None if say is None else {"failure": {"message": str(error), "config": to_plain(config)}}
    save = begin_save(policy, root, step, state, background=False, optimizer=False)
    save.complete(len(earlier) + 1, config.trainer.timeout, say)  # keeps all: by number this one may be the oldest
    if say is not None:
        error.inputs.save(folder / PASS_FILE)
        for other in earlier:
            shutil.rmtree(other, ignore_errors=True)
        say(
            f"the batch that failed and its weights: {folder}; dynamo-megatron replay --step {output} {step} repeats it"
        )
