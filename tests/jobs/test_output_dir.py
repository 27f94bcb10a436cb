import fcntl
import json
import re
from pathlib import Path

import pytest

from dynamo_megatron.checkpoint.folder import write_manifest
from dynamo_megatron.config import Config
from dynamo_megatron.config.files import ConfigError
from dynamo_megatron.jobs.output_dir import OutputDir


def settings(folder: Path, **sections) -> Config:
    return Config(**{"model": {"path": "m"}, "data": {"source": "s"}, "output_dir": str(folder), **sections})


AHEAD = {"rollout": {"max_staleness": 2}, "algorithm": {"rollout_correction": {}}}
COSINE = {"optimizer": {"schedule": "cosine"}}


@pytest.mark.parametrize(
    ("sections", "change", "left"),
    [
        ({}, {"optimizer": {"lr": 2e-3}}, "45"),
        (AHEAD, {"optimizer": {"lr": 2e-3}}, "456"),
        ({}, {"trainer": {"steps": 200}}, "456"),
        (COSINE, {"trainer": {"steps": 200}}, "45"),  # the schedule is another one
    ],
)
def test_rollouts_of_weights_that_will_not_come_again_are_dropped(tmp_path, sections, change, left):
    """After step 4, step 5's rollouts are of the checkpoint's weights, step 6's of what other settings led to, unless
    they were generated ahead."""
    (tmp_path / "rollouts").mkdir()
    for step in (4, 5, 6):
        (tmp_path / "rollouts" / f"step-{step:06d}.jsonl.zst").write_text("{}\n")
    for given, steps in ((sections, "456"), (sections, "456"), (sections | change, left)):
        OutputDir(settings(tmp_path, **given)).take_over(4, 1)
        assert "".join(sorted(p.name[10] for p in (tmp_path / "rollouts").iterdir())) == steps


@pytest.mark.parametrize(("ranks", "left"), [(2, "56"), (1, "5")])
def test_rollouts_of_another_number_of_ranks_are_dropped(tmp_path, ranks, left):
    (saved := tmp_path / "checkpoints" / "step-000004").mkdir(parents=True)
    write_manifest(saved, {"step": 4, "model": {}, "dtype": "bfloat16", "layout": {"ranks": 2}})
    (tmp_path / "rollouts").mkdir()
    for step in (5, 6):
        (tmp_path / "rollouts" / f"step-{step:06d}.jsonl.zst").write_text("{}\n")
    for given in (2, ranks):
        OutputDir(settings(tmp_path)).take_over(4, given)
    assert "".join(sorted(p.name[10] for p in (tmp_path / "rollouts").iterdir())) == left


def test_exports_of_steps_that_come_again_are_exported_again(tmp_path):
    for folder, step in (("hf", 20), ("hf-step-000010", 10), ("hf-step-000020", 20)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "export.json").write_text(json.dumps({"step": step}))
    OutputDir(settings(tmp_path)).take_over(10, 1)
    assert [path.parent.name for path in tmp_path.glob("*/export.json")] == ["hf-step-000010"]


@pytest.mark.parametrize(
    ("now", "says"),
    [
        ({"optimizer": {"lr": 2e-6}}, "already at step 4 of 4"),
        ({"trainer": {"steps": 12}}, None),
        ({"checkpoint": {"export_hf": "never"}}, None),
        ({"eval": {"data": "held-out", "every": 2}}, None),
    ],
)
def test_a_run_that_has_ended_is_finished_unless_more_is_asked(tmp_path, now, says):
    (tmp_path / "metrics.jsonl").write_text('{"step": 4}\n')
    sections = {"trainer": {"steps": 4}}
    before = OutputDir(settings(tmp_path, **sections))
    before.take_over(0, 1)
    assert before.finished() is None
    for step in (2, 4):
        (saved := tmp_path / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
        write_manifest(saved, {"step": step, "model": {}, "dtype": "bfloat16", "layout": None})
    before.end(4)
    assert before.finished() is None, "its export is gone"
    (tmp_path / "hf").mkdir()
    said = OutputDir(settings(tmp_path, **{**sections, **now})).finished()
    assert said == (says and f"{tmp_path}: {says}")
    (saved / "manifest.json").unlink()
    assert before.finished() is None, "the checkpoint of step 4 is gone"
    before.take_over(4, 1)
    assert before.finished() is None, "it goes on"


def test_a_folder_in_which_another_process_trains_is_refused(tmp_path):
    with open(tmp_path / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process trains in"):
            OutputDir(settings(tmp_path)).claim()


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({}, "\n"),
        ({"optimizer": {"lr": 2e-6}, "trainer": {"steps": 5}}, ", with optimizer.lr 2e-06 instead of 1e-06, trainer.s"),
        ({"rollout": {"server_args": ["--x"]}}, ', with rollout.server_args ["--x"] instead of []\n'),
    ],
)
def test_a_resume_says_what_it_changes(tmp_path, capsys, sections, says):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    OutputDir(settings(tmp_path)).take_over(0, 1)
    OutputDir(settings(tmp_path, **sections)).claim()
    assert capsys.readouterr().out.startswith(f"{tmp_path}: the run there has no checkpoint and begins again{says}")


def test_the_seed_and_the_method_of_a_run_may_not_change(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    OutputDir(settings(tmp_path, seed=3)).take_over(0, 1)
    OutputDir(settings(tmp_path, seed=3, data={"source": "s", "shuffle_seed": 3})).check()
    for other, key in (
        ({}, "data.shuffle_seed, seed"),
        ({"seed": 3, "data": {"source": "s", "shuffle_seed": 0}}, "data.shuffle_seed"),
        ({"seed": 3, "algorithm": {"advantage": {"kind": "grpo"}}}, "algorithm.advantage.kind"),
    ):
        with pytest.raises(ConfigError, match=f"holds a run with another {key}; it has no checkpoint: delete it"):
            OutputDir(settings(tmp_path, **other)).check()


def fill(folder: Path, names: str) -> Path:
    """Empty files and, with a slash at the end, folders."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names.split():
        if name.endswith("/"):
            (folder / name).mkdir()
        else:
            (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ("LICENSE config.json model.safetensors", " is a model's folder (config.json); name a new folder"),
        ("common.pt __0_0.distcp .metadata", " is a model's folder (__0_0.distcp); name a new folder"),
        ("logs/ thesis.tex", " holds thesis.tex, which is not of a run; name a new folder"),
        ("step-000004/", " holds step-000004, which is not of a run; name a new folder"),  # a run's checkpoints/
        ("config.yaml problems.jsonl summary.json table.md logs/", " holds problems.jsonl, which is"),  # an evaluation
    ],
)
def test_a_folder_with_files_that_are_not_of_a_run_is_refused(tmp_path, names, says):
    folder = fill(tmp_path / "mine", names)
    before = sorted(folder.rglob("*"))
    for refuses in (OutputDir(settings(folder)).finished, OutputDir(settings(folder)).check):
        with pytest.raises(ConfigError) as refused:
            refuses()
        assert str(refused.value).startswith(f"output_dir: {folder}{says}") and "\n" not in str(refused.value)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    "names", ["", "logs/ rollouts/ .lock", "config.yaml train.sbatch logs/ slurm-7.out", "servers/"]
)
def test_an_empty_folder_and_what_a_run_left_before_its_first_result_are_not_refused(tmp_path, names):
    assert OutputDir(settings(fill(tmp_path / "run", names))).finished() is None


METRICS = '{"step": 1, "reward/mean": 0.5}\n{"step": 2, "reward/mean": 0.5}\n'
DRAWN = '{"step": 1, "prompt_id": "a", "n": 8}\n{"step": 2, "prompt_id": "a", "n": 8}\n'
MEND = "restore the file from a copy, or delete this line of it"
ANOTHER = "restore it from a copy, or name another folder"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("metrics.jsonl", METRICS + "{]\n", f":3: not JSON (Expecting property name .*); {MEND}"),
        ("allocation.jsonl", DRAWN + "\0" * 20 + "\n", f":3: not JSON (.*); {MEND}"),
        ("config.yaml", "model: {path: m\n", f":2: not YAML (.*); {ANOTHER}"),
        ("config.yaml", "\xff", f": not UTF-8 text (.*); {ANOTHER}"),
    ],
)
def test_a_broken_file_of_a_run_is_one_line_before_anything_starts(tmp_path, name, text, says):
    config = settings(tmp_path)
    OutputDir(config).take_over(0, 1)
    (tmp_path / "metrics.jsonl").write_text(METRICS)
    (tmp_path / "allocation.jsonl").write_text(DRAWN)
    OutputDir(config).check()
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    for refuses in (OutputDir(config).finished, OutputDir(config).claim):
        with pytest.raises(ConfigError) as refused:
            refuses()
        expected = re.escape(says).replace(r"\.\*", ".*")
        assert re.fullmatch(f"output_dir: {re.escape(str(tmp_path / name))}{expected}", str(refused.value)), refused


@pytest.mark.parametrize("steps", [(6,), (3, 6)])
def test_a_run_with_only_damaged_checkpoints_is_refused_before_anything_starts(tmp_path, steps):
    config = settings(tmp_path)
    OutputDir(config).take_over(0, 1)
    folders = [tmp_path / "checkpoints" / f"step-{step:06d}" for step in steps]
    for step, folder in zip(steps, folders, strict=True):
        folder.mkdir(parents=True)
        (folder / "state.json").write_text("{}")
        write_manifest(folder, {"step": step, "model": {}, "dtype": "bfloat16", "layout": None})
    for folder in folders:
        assert OutputDir(config).finished() is None, "it can go on"
        (folder / "state.json").unlink()
    with pytest.raises(ConfigError) as error:
        OutputDir(config).finished()
    root = tmp_path / "checkpoints"
    assert str(error.value) == (
        f"output_dir: {root}: the checkpoint of step 6 is damaged: {folders[-1] / 'state.json'}: missing, and no other "
        f"is complete; to start from step 0 move {root} away"
    )
