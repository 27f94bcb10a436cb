"""Too little disk for a run is found before it starts."""


def test_a_full_disk(small_disk, failure):
    said = failure("disk", f"output_dir={small_disk}/run")
    assert "has 1.05 MB free, the run needs" in said and "lower checkpoint.keep_last" in said


def test_rollouts_that_will_fill_the_disk_are_noted(base, check):
    level, text = check("disk", "trainer.steps=1000000000000")[-1]
    assert level == "note" and "in 1000000000000 steps; 50% of what is free holds " in text and "the oldest go" in text


def test_the_steps_that_stay_are_part_of_the_room_needed(base, check):
    (level, text), *more = check("disk", "rollout.keep_last=7")
    assert level == "ok" and "the rollouts of 8 steps" in text and not more
    _, (level, text) = check("disk", "trainer.steps=10")
    assert level == "ok" and "all are kept, they may take 50% of what is free" in text
