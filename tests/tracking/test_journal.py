"""The last line of a run, and what a resume does with its statistics and scores."""

import pytest

from dynamo_megatron.checkpoint.folder import write_manifest
from dynamo_megatron.checkpoint.safetensors_folder import EXPORT_FILE, exported_step
from dynamo_megatron.config import Config
from dynamo_megatron.rollout.store import step_files
from dynamo_megatron.tracking.journal import Journal, last_line


def made(tmp_path, export: str, folder: str | None, **sections) -> Config:
    output = tmp_path / "run"
    if folder is not None:
        (output / folder).mkdir(parents=True)
        (output / folder / EXPORT_FILE).write_text('{"step": 48}')
    return Config(
        model={"path": "m"}, data={"source": "d"}, checkpoint={"export_hf": export}, output_dir=str(output), **sections
    )


@pytest.mark.parametrize(("export", "folder"), [("final", "hf"), ("every", "hf-step-000064")])
def test_the_exported_model(tmp_path, export, folder):
    line = last_line(made(tmp_path, export, folder), 64)
    assert line == f"model: {tmp_path / 'run' / folder} (step 48)"


@pytest.mark.parametrize("export", ["never", "best"])
def test_without_an_export_the_checkpoint_is_named_with_its_conversion(tmp_path, export):
    config = made(tmp_path, export, None, eval={"every": 8, "data": "x"})
    run = tmp_path / "run"
    assert last_line(config, 64).startswith("model: not saved (checkpoint.every is null")
    folder = run / "checkpoints" / "step-000064"
    folder.mkdir(parents=True)
    write_manifest(folder, {"step": 64, "model": {}, "dtype": "bfloat16", "layout": None})
    assert last_line(config, 64) == f"model: {folder} (Megatron checkpoint, for `dynamo-megatron convert mcore2hf`)"
    assert "(Megatron checkpoint of step 64; later ones are not saved, for" in last_line(config, 80)


ROW = {"rollout_id": "a", "entropy": [0.5]}


def test_a_resume_drops_the_statistics_of_later_steps(tmp_path):
    config = made(tmp_path, "never", "")
    for start, steps in ((0, range(1, 6)), (3, ())):
        journal = Journal(config)
        journal.open(start)
        for step in steps:
            journal.tokens(step, [ROW])
        journal.close()
    assert list(step_files(tmp_path / "run", "tokens")) == [1, 2, 3]


def test_scores_of_other_problems_are_not_compared(tmp_path):
    (tmp_path / "run").mkdir()

    def opened(limit: int, problems: str = "a") -> Journal:
        journal = Journal(made(tmp_path, "best", None, eval={"every": 8, "data": "x", "limit": limit}))
        journal.evaluates(problems)
        journal.open(16)
        return journal

    def summary(step: int, score: float) -> dict:
        scores = {f"eval/pass@1{end}": score for end in ("", "_low", "_high")}
        return {"step": step, **scores, "eval/problems": 4, "eval/failed": 0.0}

    journal = opened(limit=4)
    journal.evaluation(summary(8, 0.6))
    journal.close()
    journal = opened(limit=4)
    journal.evaluation(summary(16, 0.5))
    assert journal.best(8) and journal.best(16), "nothing is exported"
    (tmp_path / "run" / "hf").mkdir()
    for exported, step, better in ((16, 8, True), (8, 16, False)):
        (tmp_path / "run" / "hf" / EXPORT_FILE).write_text(f'{{"step": {exported}}}')
        assert journal.best(step) == better
    assert opened(limit=4).evaluated(8) and not opened(limit=4, problems="b").evaluated(8)
    (tmp_path / "run" / "hf-step-000008").rename(tmp_path / "run" / "hf")
    journal = opened(limit=5)
    assert not journal.evaluated(8) and exported_step(tmp_path / "run" / "hf-step-000008") == 8  # it is kept
    journal.evaluation(summary(16, 0.3))
    assert journal.best(16)
