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

    def wait_ready(self):
        pass

    def evaluate(self, prompts, on_count):
        self.calls.append([prompt.prompt_id for prompt in prompts])
        if "fails" in self.config.model.path and len(self.calls) == 2:
            raise StandIn.failure
        return [self.answered(prompt) for prompt in prompts]

    def answered(self, prompt) -> ProblemResult:
        assert prompt.tokens
        right = int(prompt.prompt_id[-1]) % SAMPLES + self.config.model.path.endswith("better")
        successes = [i < right for i in range(SAMPLES)]
        fields = {"lengths": 5, "finish_reasons": "stop", "statuses": "ok", "responses": "r"}
        same = {name: [value] * SAMPLES for name, value in fields.items()}
        return ProblemResult(prompt.prompt_id, prompt.source, [float(s) for s in successes], successes, **same)

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


def test_one_set_without_a_suite(models, capsys):
    words = ["--out", "scores", "eval.data=sets/hard.jsonl", "eval.limit=2", *KEYS]
    assert main(["eval", "--model", "base", *words]) == 0, capsys.readouterr().err
    results = read_results(models / "scores" / "base" / "hard.jsonl")
    assert StandIn.started[0].calls == [["hard/0", "hard/1"]]  # the limit is of each set
    summary = json.loads((models / "scores" / "summary.json").read_text())
    assert summary["models"]["base"]["sets"]["hard"] == summarise(results, [1, 4]) and not summary["differences"]
    assert (models / "scores" / "table.md").read_text().startswith("sets/hard.jsonl: 4 a problem, temperature 1, at ")


def test_several_greedy_samples_are_warned_about(models, caplog):
    words = ["eval", "--model", "base", "eval.data=sets/hard.jsonl", *KEYS, "eval.temperature=0"]
    assert main([*words, "--out", "one", "eval.samples=1", "eval.k=[1]"]) == 0 and "greedy" not in caplog.text
    assert main([*words, "--out", "four"]) == 0
    assert "warning: eval.temperature=0 is greedy" in (models / "four" / "table.md").read_text()


def test_keys_that_only_training_needs_refuse_no_evaluation(models):
    """And a run's servers share GPUs with its ranks, from which they get FP8 weights; an evaluation has none."""
    words = ["checkpoint.export_hf=best", "model.dtype=bfloat16", "rollout.quantization=fp8"]
    assert main(["eval", "--model", "base", "--out", "out", "eval.data=sets/hard.jsonl", *KEYS, *words]) == 0
    found = [(worker.config.rollout.quantization, worker.config.rollout.memory_fraction) for worker in StandIn.started]
    assert found == [(None, 0.85)]
    with pytest.raises(ConfigError):
        compose([], ["model.path=base", "data.source=sets/hard.jsonl", "output_dir=run", *words])


@pytest.mark.parametrize("failure", [RolloutError("the server is gone"), InputError("the server is gone")])
def test_what_was_finished_is_kept_where_a_server_is_lost(models, capsys, monkeypatch, failure):
    monkeypatch.setattr(StandIn, "failure", failure)
    assert main([*SUITE, "--model", "base", "--model", "fails"]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == "the server is gone; the responses of 3 finished sets can be found in scores"
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
    assert StandIn.started == []


def test_a_server_that_does_not_answer_is_named(models, capsys):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        words = ["eval", "--model", url, "model.path=base", "eval.data=sets/hard.jsonl", *KEYS, "--out", "scores"]
        assert main(words) == 2
        assert StandIn.started == []
        assert capsys.readouterr().err.startswith(f"--model: nothing answers at {url} (")
        server.listen()
        assert main(words) == 0
    assert StandIn.started.pop().config.rollout.urls == [url]


@pytest.mark.parametrize("names", [("base", "./base/"), ("a b", "a:b")])
def test_models_of_one_name_are_refused(models, capsys, names):
    for name in ("a b", "a:b"):
        (models / name).symlink_to("base")
    assert main([*SUITE, "--model", names[0], "--model", names[1]]) == 2
    assert capsys.readouterr().err.startswith(f"--model: {names[1]}: the responses of two models would both go to sco")


def test_a_suite_needs_the_folder_of_its_sets(models, capsys):
    assert main([*SUITE[:5], *KEYS, "data.source=sets/easy.jsonl", "--model", "base"]) == 2
    assert capsys.readouterr().err.startswith("eval.data: missing; --suite takes its sets from")
    assert StandIn.started == []


def a_run(models, monkeypatch, *keys):
    """A run named `run` with these keys."""
    needed = ["model.path=base", "data.source=sets/easy.jsonl", "output_dir=run"]
    monkeypatch.setattr(subjects, "run_config", lambda checkpoint: compose([], [*needed, *keys])[0])
    monkeypatch.setattr(subjects, "find_checkpoint", lambda path: (1, models / "better"))


def test_a_run_without_problems_of_its_own_is_told_that_it_has_seen_them(models, monkeypatch, caplog):
    a_run(models, monkeypatch)
    assert main(["eval", "--model", "run", "--out", "out"]) == 0
    assert "run is evaluated on what it was trained on" in caplog.text


def test_rewards_of_tokens_are_no_part_of_an_evaluation(models, monkeypatch):
    a_run(models, monkeypatch, "reward.functions=[math,prime]", "reward.prime={model: p, beta: 0.1}")
    assert main([*SUITE, "--model", "base", "--model", "run"]) == 0
    reward = yaml.safe_load((models / "scores" / "config.yaml").read_text())["reward"]
    assert reward["functions"] == ["math"] and reward["prime"]["model"] is None
    assert StandIn.started[1].config.reward.functions == ["math"]


AGENT = "rollout.agent=mine:agent"


@pytest.mark.parametrize(
    ("keys", "says", "for_all"),
    [
        (["rollout.temperature=0.7"], "eval.temperature: 1.0 for base, 0.7 for run", []),
        (["reward.functions=[qa_f1]"], "reward.functions: ['math'] for base, ['qa_f1'] for run", []),
        (["data.template='{prompt}!'"], "data.template: 'chat' for base, '{prompt}!' for run", []),
        ([AGENT, "rollout.tool_parser=llama3"], "rollout.tool_parser: 'qwen25' for base, 'llama3' for run", [AGENT]),
    ],
)
def test_settings_that_differ_between_models_are_refused(models, capsys, monkeypatch, keys, says, for_all):
    """A run brings its config, and a Hugging Face folder has the defaults."""
    a_run(models, monkeypatch, *keys)
    assert main([*SUITE, "--model", "base", "--model", "run", *for_all]) == 2
    assert capsys.readouterr().err == f"{says}; give one for all: {says.partition(':')[0]}=VALUE\n"
    if says.startswith("eval."):
        assert main([*SUITE, "--model", "base", "--model", "run", "eval.temperature=1"]) == 0
