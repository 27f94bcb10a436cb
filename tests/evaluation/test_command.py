"""`dynamo-megatron eval` with a stand-in for the servers: sets, models side by side, warnings, refusals."""

import json
import shutil
from typing import ClassVar

import pytest
import yaml

from dynamo_megatron.cli import main
from dynamo_megatron.config.files import compose
from dynamo_megatron.evaluation import command, subjects
from dynamo_megatron.evaluation.results import read_results, summarise
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.types import ProblemResult

SAMPLES = 4


class StandIn:
    """Answers right as often as the last digit of the problem says, more often where its model's folder is "better"."""

    started: ClassVar[list["StandIn"]] = []

    def __init__(self, config, *_):
        self.config, self.calls, self.closed = config, [], False
        StandIn.started.append(self)

    def start(self):
        pass

    def wait_ready(self, on_poll):
        on_poll()

    def evaluate(self, prompts, on_poll, on_count):
        self.calls.append([prompt.prompt_id for prompt in prompts])
        if "fails" in self.config.model.path and len(self.calls) == 2:
            raise RolloutError("the server is gone")
        return [self.answered(prompt) for prompt in prompts]

    def answered(self, prompt) -> ProblemResult:
        assert prompt.tokens
        right = int(prompt.prompt_id[-1]) % SAMPLES + self.config.model.path.endswith("better")
        successes = [i < right for i in range(SAMPLES)]
        return ProblemResult(
            prompt_id=prompt.prompt_id,
            source=prompt.source,
            rewards=[float(s) for s in successes],
            successes=successes,
            lengths=[5] * SAMPLES,
            finish_reasons=["stop"] * SAMPLES,
            statuses=["ok"] * SAMPLES,
            responses=["r"] * SAMPLES,
        )

    def close(self):
        self.closed = True


@pytest.fixture
def models(tiny_model, tmp_path, monkeypatch):
    """Folders of sets and of copies of a model."""
    monkeypatch.setattr(command, "RolloutWorker", StandIn)
    monkeypatch.setattr(StandIn, "started", [])
    for name in ("base", "better", "fails"):
        shutil.copytree(tiny_model, tmp_path / name)
    (tmp_path / "sets").mkdir()
    for name, count in (("easy", 3), ("hard", 5)):
        rows = [{"id": f"{name}/{i}", "problem": f"{name} {i}: {'why ' * i}?", "answer": "1"} for i in range(count)]
        (tmp_path / "sets" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


KEYS = ["model.max_length=128", "eval.max_new_tokens=8", f"eval.samples={SAMPLES}", "eval.k=[1,4]"]
SUITE = ["eval", "--suite", "easy,hard", "--out", "scores", "eval.data=sets", *KEYS]


def test_models_side_by_side(models, capsys):
    assert main([*SUITE, "--model", "base", "--model", "better", "eval.temperature=0"]) == 0, capsys.readouterr().err
    assert [worker.calls for worker in StandIn.started] == 2 * [
        [[f"easy/{i}" for i in range(3)], [f"hard/{i}" for i in range(5)]]
    ]
    assert all(worker.closed for worker in StandIn.started)
    summary = json.loads((models / "scores" / "summary.json").read_text())
    for model in ("base", "better"):
        for name in ("easy", "hard"):
            results = read_results(models / "scores" / model / f"{name}.jsonl")
            assert summary["models"][model][name] == summarise(results, [1, 4])
    assert summary["differences"]["better"]["easy"]["eval/pass@1"] == pytest.approx(0.25)
    table = (models / "scores" / "table.md").read_text()
    assert table.startswith("sets: 4 a problem, greedy, at most 8 tokens\n\n| pass@1, % (95 %) | easy (3) | hard (5) |")
    assert table in capsys.readouterr().out
    assert yaml.safe_load((models / "scores" / "config.yaml").read_text())["eval"]["data"] == "sets"
    left = {path.name for path in (models / "scores").iterdir()}
    assert left == {"base", "better", "summary.json", "table.md", "config.yaml", "logs"}


def test_several_models_without_a_suite_and_one_model_with(models, capsys):
    words = ["--model", "base", "--model", "better", "--out", "scores", "eval.data=sets/hard.jsonl", *KEYS]
    assert main(["eval", *words]) == 0, capsys.readouterr().err
    assert len(read_results(models / "scores" / "better" / "hard.jsonl")) == 5
    assert main([*SUITE, "--model", "base", "--out", "alone"]) == 0
    assert len(read_results(models / "alone" / "base" / "easy.jsonl")) == 3


def test_one_model_and_one_set_are_written_as_before(models):
    assert main(["eval", "--model", "base", "--out", "scores", "eval.data=sets/hard.jsonl", *KEYS]) == 0
    results = read_results(models / "scores" / "problems.jsonl")
    assert json.loads((models / "scores" / "summary.json").read_text()) == summarise(results, [1, 4])
    assert (models / "scores" / "table.md").read_text().startswith("sets/hard.jsonl\n\n| evaluation | problems |")


def test_the_limit_is_of_each_set(models):
    assert main([*SUITE, "--model", "base", "eval.limit=2"]) == 0
    assert StandIn.started[0].calls == [["easy/0", "easy/1"], ["hard/0", "hard/1"]]


def test_what_was_finished_is_kept_where_a_server_is_lost(models, capsys):
    assert main([*SUITE, "--model", "base", "--model", "fails"]) == 1
    assert "the server is gone" in capsys.readouterr().err
    kept = sorted(str(path.relative_to(models / "scores")) for path in (models / "scores").rglob("*.jsonl"))
    assert kept == ["base/easy.jsonl", "base/hard.jsonl", "fails/easy.jsonl"]
    assert not (models / "scores" / "config.yaml").exists() and StandIn.started[1].closed


def test_models_of_one_name_are_refused(models, capsys):
    assert main([*SUITE, "--model", "base", "--model", "./base/"]) == 2
    assert capsys.readouterr().err == "--model: two have the same name; name each model once\n"


def test_settings_that_differ_between_models_are_refused(models, capsys, monkeypatch):
    """A run brings its config, and a Hugging Face folder has the defaults."""

    def config_of_a_run(checkpoint):
        return compose(
            [], ["model.path=base", "data.source=sets/easy.jsonl", "output_dir=run", "rollout.temperature=0.7"]
        )[0]

    monkeypatch.setattr(subjects, "run_config", config_of_a_run)
    monkeypatch.setattr(subjects, "find_checkpoint", lambda path: (1, models / "better"))
    assert main([*SUITE, "--model", "base", "--model", "run"]) == 2
    said = capsys.readouterr().err
    assert said == "rollout.temperature: 1.0 for base, 0.7 for run; give one for all: rollout.temperature=VALUE\n"
    assert main([*SUITE, "--model", "base", "--model", "run", "rollout.temperature=0.7"]) == 0


def test_problems_of_the_training_data_are_warned_about(models, capsys, caplog):
    (models / "train.jsonl").write_text(json.dumps({"id": "t", "problem": "HARD 3; why, why, why", "answer": "2"}))
    assert main([*SUITE, "--model", "base", "data.source=train.jsonl"]) == 0
    warned = "eval.data: 1 of 5 problems of hard have at least 50% of their 13-grams of words in one prompt of "
    assert [record.message.startswith(warned) for record in caplog.records] == [True]
    table = (models / "scores" / "table.md").read_text()
    assert f"warning: {warned}train.jsonl (the most, 100%: 'hard/3' in 't')" in table and "of easy have" not in table


def test_training_data_that_is_not_there_is_no_error(models, capsys, caplog):
    assert main([*SUITE, "--model", "base", "data.source=gone.jsonl"]) == 0
    assert ["was not compared with the training data" in record.message for record in caplog.records] == [True]


def test_a_set_that_is_not_there_ends_it_before_a_server_starts(models, capsys):
    assert main([*SUITE[:2], "easy,none", *SUITE[3:], "--model", "base"]) == 2
    assert "--suite: there is no file sets/none.jsonl" in capsys.readouterr().err
    assert StandIn.started == [] and not (models / "scores").exists()
