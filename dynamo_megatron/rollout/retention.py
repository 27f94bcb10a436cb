"""Which steps' rollouts stay on disk: `rollout.keep_last`, and what a run that was stopped has kept."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from dynamo_megatron.checkpoint.folder import latest_checkpoint
from dynamo_megatron.rollout.store import step_files, tokens_file
from dynamo_megatron.runtime.routes import RouteShape

SHARE = 0.5  # of the free disk space and rollouts/ together: above it, without keep_last, the oldest are removed
STORED_TOKEN, STORED_ROLLOUT = 14, 1000  # bytes for each response token, and for the rest of a rollout


def stored_step(
    rollouts: int, response_tokens: float, routes: RouteShape | None = None, prompt_tokens: float = 0
) -> float:
    """Returns an allowance, in bytes, for a step's rollouts on disk with `response_tokens` tokens each on average, and
    with the `routes` of these and of `prompt_tokens`."""
    routed = 0 if routes is None else (prompt_tokens + response_tokens) * routes.token_bytes
    return rollouts * (STORED_ROLLOUT + response_tokens * STORED_TOKEN + routed)


def after_a_stop(output: Path) -> str:
    """What a run in `output` that was stopped early has kept, and what the same command does next: for its last
    message."""
    last = latest_checkpoint(output / "checkpoints")
    step = 0 if last is None else last[0]
    *_, newest = (0, *step_files(output))
    kept = f"; the rollouts of the steps from {step + 1} to {newest} are kept" if newest > step else ""
    if last is not None:
        return f"the same command resumes from the checkpoint of step {step}{kept}"
    return f"{'' if kept else 'nothing is saved yet: '}the same command starts from step 0{kept}"


class Retention:
    """Removes the rollouts of old steps of the run in `folder`, with the statistics of their tokens, but none after its
    last checkpoint: a resumed run uses them.

    `keep_last`: number of steps kept before the one that begins; None: all, while rollouts/ takes at most SHARE of its
    size and the free disk space together.
    """

    def __init__(self, folder: Path, keep_last: int | None):
        self._folder, self._keep_last, self._noted = folder, keep_last, False

    def trim(self, step: int) -> list[str]:
        """Call it before the rollouts of `step` are generated. Returns a note the first time that anything is
        removed."""
        last = latest_checkpoint(self._folder / "checkpoints")
        files = step_files(self._folder)
        removable = [s for s in files if last is not None and s <= last[0] and s < step]
        if self._keep_last is not None:
            gone = [s for s in removable if s < step - self._keep_last]
            why = f"rollout.keep_last is {self._keep_last}"
        else:
            gone, why = self._beyond_share(step, removable, files)
        try:
            for old in gone:
                tokens_file(self._folder, old).unlink(missing_ok=True)  # first: a kill in between leaves none behind
                files[old].unlink(missing_ok=True)
        except OSError as error:  # no reason to end a run
            why += f"; but {error.filename} cannot be removed: {error.strerror}"
        if not gone or self._noted:
            return []
        self._noted = True
        return [f"removing the oldest rollouts from now on, beginning with step {gone[0]}: {why}"]

    def _beyond_share(self, step: int, removable: list[int], files: dict[int, Path]) -> tuple[list[int], str]:
        sizes = {}
        for over in (s for s in files if s < step):
            with contextlib.suppress(FileNotFoundError):  # a user may move files meanwhile
                sizes[over] = files[over].stat().st_size
        used = sum(sizes.values())
        room = used + shutil.disk_usage(self._folder).free
        why = (
            f"{self._folder / 'rollouts'} takes {used / 1e9:.3g} GB, more than {SHARE:.0%} of the {room / 1e9:.3g} GB "
            "available to it (rollout.keep_last sets how many steps are kept)"
        )
        gone = []
        for old in removable:
            if used <= SHARE * room:
                break
            gone.append(old)
            used -= sizes.get(old, 0)
        return gone, why
