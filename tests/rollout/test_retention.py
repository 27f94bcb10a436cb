"""Which steps' rollouts stay on disk, and what a start reads of those that do."""

import pytest
from stand_ins import rollout

from dynamo_megatron.checkpoint.folder import write_manifest
from dynamo_megatron.rollout.retention import Retention
from dynamo_megatron.rollout.store import RolloutStore, step_files


def make_run(folder, steps: int, saved: int | None) -> None:
    """Rollouts of `steps` steps and the checkpoint of step `saved`."""
    store = RolloutStore(folder)
    for step in range(1, steps + 1):
        store.append(rollout(f"{step:06d}-0000-000"))
    store.close()
    if saved is not None:
        checkpoint = folder / "checkpoints" / f"step-{saved:06d}"
        checkpoint.mkdir(parents=True)
        write_manifest(checkpoint, {"step": saved, "model": {}, "dtype": "bfloat16", "layout": None})


@pytest.mark.parametrize(
    ("saved", "keep_last", "kept"),
    [
        (8, 3, range(7, 10)),  # steps 7, 8 and 9, before step 10
        (4, 3, range(5, 10)),  # a resume goes on after step 4
        (None, 1, range(1, 10)),  # it begins anew
        (9, 50, range(1, 10)),
        (9, None, range(1, 10)),
    ],
)
def test_the_newest_steps_stay_and_those_that_a_resume_needs(tmp_path, saved, keep_last, kept):
    make_run(tmp_path, 9, saved)
    retention = Retention(tmp_path, keep_last)
    gone = len(kept) < 9
    note = f"removing the oldest rollouts from now on, beginning with step 1: rollout.keep_last is {keep_last}"
    assert retention.trim(10) == [note] * gone
    assert list(step_files(tmp_path)) == list(kept)
    RolloutStore(tmp_path).append(rollout("000010-0000-000"))
    assert retention.trim(11) == []  # it is said once
    assert 10 in step_files(tmp_path)
