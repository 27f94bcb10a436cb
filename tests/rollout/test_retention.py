"""Which steps' rollouts stay on disk, and what a start reads of those that do."""

import re

import pytest
from stand_ins import rollout

from dynamo_megatron.checkpoint.folder import write_manifest
from dynamo_megatron.rollout.retention import Retention
from dynamo_megatron.rollout.store import RolloutStore, step_file, step_files


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


def test_without_a_number_all_stay_until_they_have_half_of_the_room(small_disk):
    """Steps of 64 kB on a disk of 1 MB, of which a checkpoint has a little and another program then 256 kB."""
    make_run(small_disk, 0, 6)
    retention, said = Retention(small_disk, None), []
    for step in range(1, 8):
        said += retention.trim(step)
        step_file(small_disk, step).write_bytes(bytes(1 << 16))
    assert said == [] and len(step_files(small_disk)) == 7
    (small_disk / "other").write_bytes(bytes(1 << 18))
    said += retention.trim(8)
    assert list(step_files(small_disk)) == [3, 4, 5, 6, 7]  # 5 x 64 kB of (1024 - 256 - 4) kB
    assert len(said) == 1
    assert re.search(r"beginning with step 1: .* more than 50% of the 0\.00\d+ GB", said[0])
    (small_disk / "more").write_bytes(bytes(1 << 18))
    assert retention.trim(8) == []
    assert 7 in step_files(small_disk), "it is after the last checkpoint"
