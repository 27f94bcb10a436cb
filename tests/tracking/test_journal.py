"""The last line of a run, what its trackers say at its end, and its statistics of tokens."""

import shlex
from types import SimpleNamespace

import pytest

from dynamo_megatron.checkpoint.folder import write_manifest
from dynamo_megatron.checkpoint.safetensors_folder import EXPORT_FILE
from dynamo_megatron.config import Config
from dynamo_megatron.config.files import compose
from dynamo_megatron.rollout.store import step_files, tokens_file
from dynamo_megatron.tracking import journal
from dynamo_megatron.tracking.journal import Journal, last_line


def made(tmp_path, export: str, folder: str | None, **sections) -> Config:
    output = tmp_path / "run"
    if folder is not None:
        (output / folder).mkdir(parents=True)
        (output / folder / EXPORT_FILE).write_text('{"step": 48}')
    return Config(
        model={"path": "m"}, data={"source": "d"}, checkpoint={"export_hf": export}, output_dir=str(output), **sections
    )


@pytest.mark.parametrize(("export", "folder"), [("final", "hf"), ("best", "hf"), ("every", "hf-step-000064")])
def test_the_exported_model_and_the_report_of_a_run_with_evaluations(tmp_path, export, folder):
    run = tmp_path / "run"
    line = last_line(made(tmp_path, export, folder, eval={"data": "test.jsonl", "every": 8}), 64, evaluated=True)
    assert line == f"model: {run}/{folder} (step 48); next: dynamo-megatron report {run}"


def test_a_run_without_evaluations_is_to_be_evaluated(tmp_path):
    run = tmp_path / "run"
    line = last_line(made(tmp_path, "final", "hf"), 64, evaluated=False)
    next_command = f"dynamo-megatron eval --model {run} --out {run}/scores"
    assert line == f"model: {run}/hf (step 48); next: {next_command} eval.data=FILE"
    known = last_line(made(tmp_path, "final", None, eval={"data": "test.jsonl"}), 64, evaluated=False)
    assert known.endswith(next_command)


def test_a_run_of_sft_says_what_the_next_run_is_to_be_given(tmp_path):
    config = made(tmp_path / "my runs", "final", "hf")
    config = config.model_copy(update={"data": config.data.model_copy(update={"template": "{prompt}"})})
    line = last_line(config, 64, evaluated=False, supervised=True)
    keys = shlex.split(line.partition("; next: dynamo-megatron train CONFIG.yaml ")[2])
    given, _ = compose([], [*keys, "data.source=d", "output_dir=o"])
    assert (given.model.path, given.data.template) == (str(tmp_path / "my runs" / "run" / "hf"), "{prompt}")


def test_without_an_export_the_checkpoint_is_named_with_its_conversion(tmp_path):
    config, run = made(tmp_path, "never", None), tmp_path / "run"
    assert last_line(config, 64, evaluated=True).startswith("model: not saved (checkpoint.every is null")
    folder = run / "checkpoints" / "step-000064"
    folder.mkdir(parents=True)
    write_manifest(folder, {"step": 64, "model": {}, "dtype": "bfloat16", "layout": None})
    line = last_line(config, 64, evaluated=True)
    assert line == f"model: {folder} (Megatron checkpoint); next: dynamo-megatron convert mcore2hf {run} {run}/hf"


@pytest.mark.parametrize(("evaluated", "words"), [(True, ["report"]), (False, ["eval", "--model"])])
def test_the_next_command_can_be_pasted_where_the_folder_has_a_blank(tmp_path, evaluated, words):
    line = last_line(made(tmp_path / "my runs", "final", "hf"), 64, evaluated=evaluated)
    command = shlex.split(line.partition("; next: ")[2])
    assert command[: len(words) + 2] == ["dynamo-megatron", *words, str(tmp_path / "my runs" / "run")]


@pytest.fixture
def closed(tmp_path, monkeypatch, capsys):
    """closed(ended) -> (lines on the screen, seconds that the trackers had) of a journal whose tracker fails when it is
    closed."""

    def close(ended: bool) -> tuple[list[str], list[float]]:
        limits, tell = [], []
        monkeypatch.setattr(
            journal, "open_trackers", lambda config, start, say: tell.append(say) or [SimpleNamespace()]
        )
        monkeypatch.setattr(
            journal, "close_trackers", lambda trackers, within: (limits.append(within), tell[0]("warning: at the end"))
        )
        made_of = made(tmp_path, "final", "hf")
        kept = Journal(made_of)
        kept.open(0)
        tell[0]("warning: in the run")
        if ended:
            kept.ended(48)
        else:
            kept.say("the error")
        kept.close()
        return capsys.readouterr().out.splitlines(), limits

    return close


def test_the_last_line_of_a_run_stands_after_its_trackers_warnings(closed):
    lines, limits = closed(True)
    assert lines[:2] == ["warning: in the run", "warning: at the end"] and limits == [60.0]
    assert lines[2].startswith("model: ") and len(lines) == 3


def test_nothing_is_said_after_the_last_line_of_a_run_that_failed(closed):
    assert closed(False) == (["warning: in the run", "the error"], [10.0])


ROW = {"rollout_id": "a", "response": "f0", "entropy": [0.5]}


def test_a_resume_drops_the_statistics_of_later_steps(tmp_path):
    config = made(tmp_path, "never", "")
    for start, steps in ((0, range(1, 6)), (3, ())):
        journal = Journal(config)
        journal.open(start)
        for step in steps:
            journal.tokens(step, [ROW])
        journal.close()
    assert list(step_files(tmp_path / "run", "tokens")) == [1, 2, 3]


@pytest.mark.parametrize("supervised", [True, False])
def test_a_resume_names_the_steps_whose_lines_are_lost(tmp_path, capsys, supervised):
    run, config = tmp_path / "run", made(tmp_path, "never", "")
    Journal(config).open(0)
    assert not capsys.readouterr().out
    (run / "metrics.jsonl").write_text('{"step": 1}\n{"step": 4}\n{"step": 5}\n')
    Journal(config, supervised=supervised).open(4)
    said = [f"warning: {run / 'metrics.jsonl'} has no line of these steps: 2 to 3; reports have a gap there"]
    if not supervised:
        said += [f"warning: {run / 'allocation.jsonl'} has no line of these steps: 1 to 4; reports have a gap there"]
    assert capsys.readouterr().out.splitlines() == said


@pytest.fixture
def lost(tmp_path):
    """A run whose first two steps have no statistics of tokens."""
    journal = Journal(made(tmp_path, "never", ""))
    journal.open(0)
    journal.progress.start(0)
    (tmp_path / "run" / "tokens").touch()  # not a folder
    for step in (1, 2):
        journal.tokens(step, [ROW])
        if step == 1:
            journal.step({"step": 1}, None)
    return journal


def test_statistics_that_cannot_be_written_end_no_run(tmp_path, lost, capsys):
    assert not capsys.readouterr().out  # a full disk may end the run before the next step, and says so itself
    lost.step({"step": 2}, None)
    said = f"warning: {tmp_path / 'run' / 'tokens'}: File exists; step 1 has no statistics of tokens"
    assert capsys.readouterr().out.splitlines() == [said]
    (tmp_path / "run" / "tokens").unlink()
    lost.tokens(3, [ROW])
    lost.step({"step": 3}, None)
    lost.close()
    assert not capsys.readouterr().out
    assert tokens_file(tmp_path / "run", 3).is_file() and list(step_files(tmp_path / "run", "tokens")) == [3]


def test_a_run_that_fails_before_the_next_step_says_nothing_of_them(lost, capsys):
    lost.close()
    assert not capsys.readouterr().out


def test_a_run_that_ends_before_the_next_step_says_so(tmp_path, lost, capsys):
    lost.ended(2)
    lost.close()
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("warning: ") and last.startswith("model: ")
