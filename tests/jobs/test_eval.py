"""`dynamo-megatron eval` with a stand-in for the servers: sets, models side by side, warnings, refusals."""

import json
import shutil
import socket
from typing import ClassVar

import pytest
import yaml

from dynamo_megatron.cli import main
from dynamo_megatron.config.files import ConfigError, compose
from dynamo_megatron.errors import InputError
from dynamo_megatron.evaluation import subjects
from dynamo_megatron.evaluation.problems import read_problems
from dynamo_megatron.evaluation.results import read_results, summarise
from dynamo_megatron.jobs import eval as command
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.types import ProblemResult

SAMPLES = 4


class StandIn:
    """Answers right as often as the last digit of the problem says, more often where its model's folder is "better"."""

    started: ClassVar[list["StandIn"]] = []
    failure: ClassVar[Exception] = RolloutError("the server is gone")

    def __init__(self, config, *_):
        self.config, self.calls, self.closed = config, [], False

    def start(self):
        StandIn.started.append(self)

    def wait_ready(self, on_poll):
        on_poll()

    def evaluate(self, prompts, on_poll, on_count):
        self.calls.append([prompt.prompt_id for prompt in prompts])
        if "fails" in self.config.model.path and len(self.calls) == 2:
            raise StandIn.failure
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
            assert summary["models"][model]["sets"][name] == summarise(results, [1, 4])
    assert summary["differences"]["better"]["sets"]["easy"]["eval/pass@1"] == pytest.approx(0.25)
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


@pytest.mark.parametrize("words", [[], ["eval.temperature=0"], ["eval.temperature=0", "eval.samples=1", "eval.k=[1]"]])
def test_several_greedy_samples_are_warned_about(models, caplog, words):
    assert main(["eval", "--model", "base", "--out", "out", "eval.data=sets/hard.jsonl", *KEYS, *words]) == 0
    warned = len(words) == 1
    assert ("eval.temperature=0 is greedy" in caplog.text) == warned
    assert ("warning: eval.temperature=0" in (models / "out" / "table.md").read_text()) == warned


@pytest.mark.parametrize(
    "words",
    [
        ["algorithm.allocation.rollout_n_min=1", "algorithm.advantage.kind=rloo"],
        ["data.batch_prompts=2", "algorithm.loss.mini_batches=4", "algorithm.allocation.budget=1000"],
        ["trainer.stop_when={metric: eval/pass@16, above: 0.9}", "checkpoint.export_hf=best"],
        ["algorithm.loss.kind=cispo", "algorithm.loss.clip_ratio_c=null"],
    ],
)
def test_keys_that_only_training_needs_refuse_no_evaluation(models, capsys, words):
    assert main(["eval", "--model", "base", "--out", "out", "eval.data=sets/hard.jsonl", *KEYS, *words]) == 0
    with pytest.raises(ConfigError):
        compose([], ["model.path=base", "data.source=sets/hard.jsonl", "output_dir=run", *words])


def test_the_limit_is_of_each_set(models):
    assert main([*SUITE, "--model", "base", "eval.limit=2"]) == 0
    assert StandIn.started[0].calls == [["easy/0", "easy/1"], ["hard/0", "hard/1"]]


@pytest.mark.parametrize("failure", [RolloutError("the server is gone"), InputError("the server is gone")])
def test_what_was_finished_is_kept_where_a_server_is_lost(models, capsys, monkeypatch, failure):
    monkeypatch.setattr(StandIn, "failure", failure)
    assert main([*SUITE, "--model", "base", "--model", "fails"]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == "the server is gone; the responses of 3 finished sets are in scores, and the table of base"
    kept = sorted(str(path.relative_to(models / "scores")) for path in (models / "scores").rglob("*.jsonl"))
    assert kept == ["base/easy.jsonl", "base/hard.jsonl", "fails/easy.jsonl"]
    assert not (models / "scores" / "config.yaml").exists() and StandIn.started[1].closed
    summary = json.loads((models / "scores" / "summary.json").read_text())
    assert list(summary["models"]) == ["base"] and list(summary["models"]["base"]["sets"]) == ["easy", "hard"]
    assert "| base |" in (models / "scores" / "table.md").read_text()


def test_all_models_are_checked_before_the_first_server_starts(models, capsys):
    (models / "better" / "model.safetensors").write_bytes(b"damaged")
    assert main([*SUITE, "--model", "base", "--model", "better"]) == 2
    assert "better" in capsys.readouterr().err
    assert StandIn.started == [] and not (models / "scores").exists()


def test_a_server_that_never_answers_is_named_and_given_up(models, capsys, caplog):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        words = ["eval", "--model", url, "model.path=base", "eval.data=sets/hard.jsonl", *KEYS]
        assert main([*words, "--out", "none", "rollout.start_timeout=0.1"]) == 1
        assert StandIn.started == [] and f"nothing answers at {url} yet (Connection refused); waiting" in caplog.text
        said = capsys.readouterr().err
        assert f"--model: nothing answers at {url} (Connection refused) for 0.1 s; start the server" in said
        server.listen()
        assert main([*words, "--out", "scores"]) == 0
    assert StandIn.started.pop().config.rollout.urls == [url]


def test_models_of_one_name_are_refused(models, capsys):
    assert main([*SUITE, "--model", "base", "--model", "./base/"]) == 2
    said = (
        "--model: the responses of {} and of {} would both go to scores/{}; name each model once, and one of the two "
    )
    assert capsys.readouterr().err.startswith(said.format("base", "./base/", "base"))
    for name in ("a b", "a:b"):
        (models / name).symlink_to("base")
    assert main([*SUITE, "--model", "a b", "--model", "a:b"]) == 2
    assert capsys.readouterr().err.startswith(said.format("a b", "a:b", "a-b"))


def test_a_set_has_a_name_that_a_file_may_have(models, monkeypatch):
    """Without --suite it comes from eval.data, which may be of any form."""
    monkeypatch.setattr(command, "read_problems", lambda config: read_problems(easy(config)))

    def easy(config):
        return config.model_copy(update={"eval": config.eval.model_copy(update={"data": "sets/easy.jsonl"})})

    words = ["--model", "base", "--model", "better", "--out", "scores", *KEYS]
    assert main(["eval", *words, f"eval.data=datasets:of/{'x' * 300}?split=test"]) == 0
    (file,) = (models / "scores" / "base").iterdir()
    assert file.name == f"{'x' * 49}-split-test.jsonl"


def test_a_suite_without_its_folder_is_refused(models, capsys):
    assert main([*SUITE[:5], *KEYS, "--model", "base", "data.source=sets/easy.jsonl"]) == 2
    assert capsys.readouterr().err == "eval.data: missing; --suite takes its sets from this folder\n"
    assert not (models / "scores").exists()


def a_run(models, monkeypatch, *keys):
    """A run named `run` with these keys."""
    needed = ["model.path=base", "data.source=sets/easy.jsonl", "output_dir=run"]
    monkeypatch.setattr(subjects, "run_config", lambda checkpoint: compose([], [*needed, *keys])[0])
    monkeypatch.setattr(subjects, "find_checkpoint", lambda path: (1, models / "better"))


@pytest.mark.parametrize("words", [[], ["reward.functions=[math]"]])
def test_rewards_of_tokens_are_no_part_of_an_evaluation(models, monkeypatch, words):
    a_run(models, monkeypatch, "reward.functions=[math,prime]", "reward.prime={model: p, beta: 0.1}")
    assert main([*SUITE, "--model", "base", "--model", "run", *words]) == 0
    assert main([*SUITE[:4], "alone", *SUITE[5:], "--model", "run", *words]) == 0
    for out in ("scores", "alone"):
        reward = yaml.safe_load((models / out / "config.yaml").read_text())["reward"]
        assert reward["functions"] == ["math"] and reward["prime"]["model"] is None


def test_other_rewards_that_differ_are_refused(models, capsys, monkeypatch):
    a_run(models, monkeypatch, "reward.functions=[qa_f1,prime]", "reward.prime.model=p")
    assert main([*SUITE, "--model", "base", "--model", "run"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        "reward.functions: ['math'] for base, ['qa_f1'] for run; give one for all: reward.functions="
    )


def test_settings_that_differ_between_models_are_refused(models, capsys, monkeypatch):
    """A run brings its config, and a Hugging Face folder has the defaults."""
    a_run(models, monkeypatch, "rollout.temperature=0.7")
    assert main([*SUITE, "--model", "base", "--model", "run"]) == 2
    said = capsys.readouterr().err
    assert said == "rollout.temperature: 1.0 for base, 0.7 for run; give one for all: rollout.temperature=VALUE\n"
    assert main([*SUITE, "--model", "base", "--model", "run", "rollout.temperature=0.7"]) == 0


def test_what_an_evaluation_does_not_use_may_differ(models, capsys, monkeypatch):
    a_run(models, monkeypatch, "rollout.temperature=0.7", "rollout.max_new_tokens=2048")
    words = [*SUITE, "--model", "base", "--model", "run"]
    assert main(words) == 2 and "rollout.temperature: 1.0 for base, 0.7 for run" in capsys.readouterr().err
    assert main([*words, "eval.temperature=1"]) == 0


def test_an_evaluation_key_of_one_model_alone_is_refused(models, capsys, monkeypatch):
    a_run(models, monkeypatch, "eval.temperature=0.5")
    assert main([*SUITE, "--model", "base", "--model", "run"]) == 2
    said = capsys.readouterr().err
    assert said == "eval.temperature: None for base, 0.5 for run; give one for all: eval.temperature=VALUE\n"


def test_problems_of_the_training_data_are_warned_about(models, capsys, caplog):
    (models / "train.jsonl").write_text(json.dumps({"id": "t", "problem": "HARD 3; why, why, why", "answer": "2"}))
    assert main([*SUITE, "--model", "base", "data.source=train.jsonl"]) == 0
    warned = "eval.data: 1 of 5 problems of hard have at least 50% of their 13-grams of words in one prompt of "
    assert [record.message.startswith(warned) for record in caplog.records] == [True]
    table = (models / "scores" / "table.md").read_text()
    assert f"warning: {warned}train.jsonl (the most, 100%: 'hard/3' in 't')" in table and "of easy have" not in table


@pytest.mark.parametrize("source", ["datasets:of/somebody", "own_problems:endless", "reasoning_gym:chain_sum"])
def test_training_data_that_is_no_file_is_not_read(models, caplog, monkeypatch, source):
    monkeypatch.setattr(command, "training_prompts", lambda config: pytest.fail("it is read"))
    assert main([*SUITE, "--model", "base", f"data.source={source}"]) == 0
    assert not caplog.records


def test_training_data_in_a_folder_is_read(models, caplog):
    (models / "saved").mkdir()
    assert main([*SUITE, "--model", "base", "data.source=datasets:saved?split=train"]) == 0
    assert ["was not compared with the training data: data.source: " in r.message for r in caplog.records] == [True]


def test_training_data_that_is_not_there_is_no_error(models, capsys, caplog):
    assert main([*SUITE, "--model", "base", "data.source=gone.jsonl"]) == 0
    assert ["was not compared with the training data" in record.message for record in caplog.records] == [True]


def test_a_set_that_is_not_there_ends_it_before_a_server_starts(models, capsys):
    assert main([*SUITE[:2], "easy,none", *SUITE[3:], "--model", "base"]) == 2
    assert "--suite: there is no file sets/none.jsonl" in capsys.readouterr().err
    assert StandIn.started == [] and not (models / "scores").exists()


def test_servers_have_the_weights_of_the_folder_as_they_are(models, capsys):
    """A run's servers with FP8 weights get them from its ranks; an evaluation has none."""
    keys = ["model.dtype=bfloat16", "rollout.quantization=fp8", "algorithm.rollout_correction.level=token"]
    assert main([*SUITE, "--model", "base", *keys]) == 0, capsys.readouterr().err
    assert [worker.config.rollout.quantization for worker in StandIn.started] == [None]
