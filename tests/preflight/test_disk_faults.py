"""Too little disk for a run is found before it starts."""

import pytest

from dynamo_megatron.config.files import compose
from dynamo_megatron.models import load_model_config
from dynamo_megatron.planning.formulas import model_elements
from dynamo_megatron.preflight import machine_checks


def test_a_full_disk(small_disk, failure):
    said = failure("disk", f"output_dir={small_disk}/run")
    assert "has 1.05 MB free, the run needs" in said and "lower checkpoint.keep_last" in said


def test_a_failed_step_needs_room_for_its_weights_beside_those_that_are_pushed(base):
    config, _ = compose([str(base / "config.yaml")], ["model.dtype=bfloat16"])
    spec = load_model_config(config.model.path)
    needed = machine_checks.room_needed(config, spec)
    assert needed["the weights of a failed step"] == needed["the weights pushed"] == 2 * model_elements(spec)


def test_only_what_will_be_replaced_counts_as_room(small_disk, base):
    config, _ = compose([str(base / "config.yaml")], [f"output_dir={small_disk}/run"])
    spec = load_model_config(config.model.path)
    for folder, enough in (("rollouts", False), ("checkpoints", True)):
        file = small_disk / "run" / folder / "file"
        file.parent.mkdir(parents=True)
        with file.open("wb") as sparse:
            sparse.truncate(1 << 30)
        if enough:
            assert "the rollouts of 1 step" in machine_checks.check_room(config, spec)
        else:
            with pytest.raises(ValueError, match=r"has 1\.0\d MB free, the run needs"):
                machine_checks.check_room(config, spec)


def test_rollouts_of_an_earlier_start_are_room_where_old_ones_go(small_disk, base):
    """`rollout.keep_last` 50 at 116 kB a step at most: the disk is full of what the run itself will replace."""
    keys = [f"output_dir={small_disk}/run", "rollout.keep_last=50", "trainer.steps=100", "rollout.max_new_tokens=400"]
    config, _ = compose([str(base / "config.yaml")], keys)
    spec = load_model_config(config.model.path)
    with pytest.raises(
        ValueError, match=r"the rollouts of 51 steps .*, or lower .*checkpoint\.keep_last or rollout\.kee"
    ):
        machine_checks.check_room(config, spec)
    file = small_disk / "run" / "rollouts" / "step-000001.jsonl.zst"
    file.parent.mkdir(parents=True)
    with file.open("wb") as sparse:
        sparse.truncate(1 << 30)
    assert "the rollouts of 51 steps" in machine_checks.check_room(config, spec)


def test_without_checkpoints_all_rollouts_need_room_and_nobody_says_that_old_ones_go(base, check, capsys):
    (level, text), *more = check("disk", "checkpoint.every=null", "trainer.steps=10")
    assert level == "ok" and "the rollouts of 10 steps" in text
    assert more == [("ok", more[0][1])] and "; all are kept: without checkpoints (checkpoint.every: null)" in more[0][1]
    (level, text), *more = check("disk", "checkpoint.every=null", "trainer.steps=1000000000000")
    assert level == "FAILED" and "the rollouts of 1000000000000 steps" in text and "set checkpoint.every" in text
    config, _ = compose([str(base / "config.yaml")], ["checkpoint.every=null", "trainer.steps=1000000000000"])
    spec = load_model_config(config.model.path)
    assert "rollouts" not in machine_checks.check_room(config, spec, generates=False)
    recorded = ["rollout.engine=recorded", "rollout.recorded=x"]
    config, _ = compose(
        [str(base / "config.yaml")], ["checkpoint.every=null", "trainer.steps=1000000000000", *recorded]
    )
    assert "rollouts" not in machine_checks.check_room(config, spec)


def test_a_file_that_goes_meanwhile_takes_no_room(tmp_path, monkeypatch):
    (tmp_path / "there").write_bytes(b"12345")
    monkeypatch.setattr(machine_checks.os, "walk", lambda folder: [(str(folder), [], ["gone", "there"])])
    assert machine_checks._folder_size(tmp_path) == 5


def test_rollouts_that_will_fill_the_disk_are_noted(base, check):
    level, text = check("disk", "trainer.steps=1000000000000")[-1]
    assert level == "note" and "in 1000000000000 steps; 50% of what is free holds " in text and "the oldest go" in text


def test_the_steps_that_stay_are_part_of_the_room_needed(base, check):
    (level, text), *more = check("disk", "rollout.keep_last=7")
    assert level == "ok" and "the rollouts of 8 steps" in text and not more
    _, (level, text) = check("disk", "trainer.steps=10")
    assert level == "ok" and "all are kept, they may take 50% of what is free" in text
