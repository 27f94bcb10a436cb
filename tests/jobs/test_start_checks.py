"""Too little disk for a run is found before it starts; the checks do without torch, whose import takes longer."""

import subprocess
import sys

import pytest

from dynamo_megatron.config.files import compose
from dynamo_megatron.jobs.start_checks import check_room
from dynamo_megatron.models import load_model_config


@pytest.fixture
def room(tiny_model, tmp_path):
    """room(*keys) -> what check_room says of a run of the tiny model."""

    def check(*keys) -> str:
        needed = [f"model.path={tiny_model}", "data={source: d, batch_prompts: 2}", f"output_dir={tmp_path}/run"]
        config, _ = compose([], [*needed, "model.dtype=bfloat16", *keys])
        return check_room(config, load_model_config(tiny_model))

    return check


def test_the_checks_of_a_run_and_its_servers_start_do_not_import_torch():
    names = ["jobs.start_checks", "jobs.run", "jobs.train", "cli.commands", "rollout.worker", "reward.worker"]
    names += ["launcher.local", "runtime.guard"]
    code = f"import sys, {', '.join(f'dynamo_megatron.{name}' for name in names)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code]).returncode == 0


def test_what_a_run_leaves_on_the_disk(room):
    said = room("checkpoint={keep_last: 3, export_hf: every, every: 10}")
    for what in ("4 checkpoints", "exported folders", "those of a failed step"):
        assert what in said
    needed, stop = room("checkpoint={every: null, export_hf: never}").split("; ")
    assert "checkpoint" not in needed and "exported" not in needed
    assert stop.startswith("a stop saves a checkpoint, ") and stop.endswith(" MB more")
    assert "1 checkpoint " in room("checkpoint.every=70", "trainer.steps=70")
    assert "checkpoint" not in room("checkpoint={every: 10, export_hf: never}").partition("; ")[2]
    assert "3 checkpoints" in room("checkpoint={every: null, export_hf: best}", "eval={every: 1, data: d}")


def test_a_resumed_run_does_not_check_free_disk_space(small_disk, room):
    file = small_disk / "run" / "checkpoints" / "file"
    with pytest.raises(ValueError, match=r"has 1\.0\d MB free, the run needs .*lower checkpoint\.keep_last"):
        room(f"output_dir={small_disk}/run")
    file.parent.mkdir(parents=True)
    file.write_text("a checkpoint")
    assert "checkpoints" in room(f"output_dir={small_disk}/run")
