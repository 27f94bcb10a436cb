"""Writes the batch that gave NaN or infinity to disk, with the weights of the pass in which it did.

`output_dir/nonfinite/step-NNNNNN` is a checkpoint folder (checkpoint/folder.py): every rank writes its shard of the
weights as they were in the pass that failed, and rank 0's state holds the pass's input, the configuration and the
message. The last checkpoint of the run would not be enough: it is up to `checkpoint.every` steps older, and getting
from there to these weights takes the same rollouts and updates again. The optimizer is left out, because no such pass
reads it. So the folder has the size of the weights: with bfloat16 2 bytes per parameter, a seventh of a checkpoint.
`replay --step` (replay/step.py) repeats the pass.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from dynamo_megatron.checkpoint.folder import checkpoint_folders
from dynamo_megatron.checkpoint.policy_state import begin_save
from dynamo_megatron.config import Config
from dynamo_megatron.config.files import to_plain
from dynamo_megatron.policy.pass_inputs import PassInputs
from dynamo_megatron.policy.policy import Policy
from dynamo_megatron.runtime.run_folder import FAILED_STEPS


def write_failed_step(
    policy: Policy, config: Config, step: int, message: str, inputs: PassInputs, say: Callable[[str], None] | None
) -> None:
    """Writes the folder of `step`, then removes the folders of earlier failures; collective over all ranks. `say`: rank
    0's, None elsewhere; it gets one line that names the folder. Raises OSError if the disk is full, RuntimeError if the
    save fails for another reason (memory, a collective)."""
    output = Path(config.output_dir)
    root, state = output / FAILED_STEPS, None
    earlier = [folder for number, folder in checkpoint_folders(root) if number != step]
    if say is not None:
        failure = {"message": message, "config": to_plain(config)}
        state = {"failure": failure, **inputs.state()}
    save = begin_save(policy, root, step, state, background=False, optimizer=False)
    save.complete(len(earlier) + 1, config.trainer.timeout, say)  # keeps all: by number this one may be the oldest
    if say is not None:
        for folder in earlier:
            shutil.rmtree(folder, ignore_errors=True)
        say(
            f"the batch that failed and its weights: {root / f'step-{step:06d}'}; "
            f"dynamo-megatron replay --step {output} {step} repeats it"
        )
