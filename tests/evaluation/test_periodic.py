import dataclasses
import os

import pytest

from dynamo_megatron.config import Config
from dynamo_megatron.evaluation.periodic import PeriodicEvaluation, cache_folder
from dynamo_megatron.evaluation.results import read_results, results_file
from dynamo_megatron.types import ProblemResult, Prompt

PROMPTS = [Prompt(f"p{i}", text="?", answer=str(i), tokens=[5, i]) for i in range(3)]


class Answers:
    """Answers each problem with its own number and how often it was asked; `right` is the reward function."""

    def __init__(self, right=lambda prompt, text: text.startswith(prompt.answer), finish="stop"):
        self.right, self.finish, self.asked = right, finish, 0

    def evaluate(self, prompts, on_poll, on_count):
        self.asked += 1
        texts = [[f"{p.answer} of {self.asked}"] for p in prompts]
        empty = [
            ProblemResult(p.prompt_id, "", [0.0], [False], [4], [self.finish], ["ok"], t)
            for p, t in zip(prompts, texts, strict=True)
        ]
        return self.rescore(prompts, empty, on_poll)

    def rescore(self, prompts, results, on_poll):
        made = []
        for prompt, result in zip(prompts, results, strict=True):
            success = [bool(self.right(prompt, text)) for text in result.responses]
            made.append(dataclasses.replace(result, successes=success, rewards=[float(s) for s in success]))
        return made


def kept_files():
    return sorted(cache_folder().glob("*.jsonl"))


@pytest.fixture
def evaluate(tmp_path, monkeypatch):
    """evaluate(answers, step=0, prompts=PROMPTS, **sections) -> (summary, lines said), in a run of its own."""
    monkeypatch.setenv("DYNAMO_MEGATRON_CACHE", str(tmp_path / "cache"))
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights" * 1000)
    (model / "config.json").write_text("{}")

    def run(answers, step=0, prompts=PROMPTS, **sections):
        output, said = tmp_path / f"run-{len(list(tmp_path.iterdir()))}", []
        config = Config(
            **{
                "model": {"path": str(model)},
                "data": {"source": "x"},
                "output_dir": str(output),
                "eval": {"data": "x", "every": 2},
                **sections,
            }
        )
        summary = PeriodicEvaluation(config, prompts, answers).run(step, lambda: None, lambda *_: None, said.append)
        assert len(read_results(results_file(output, step))) == len(prompts)
        return summary, said

    run.model = model
    return run


def test_when_it_is_due():
    needed = {"model": {"path": "m"}, "data": {"source": "x"}, "output_dir": "o"}
    config = Config(**needed, eval={"data": "x", "every": 3}, trainer={"steps": 5})
    evaluation = PeriodicEvaluation(config, PROMPTS, None)
    assert [step for step in range(6) if evaluation.due(step)] == [0, 3, 5]


def test_methods_start_from_one_evaluation(evaluate):
    answers = Answers()
    first, said = evaluate(answers)
    assert answers.asked == 1 and not said and first["eval/pass@1"] == 1.0
    again, said = evaluate(answers, algorithm={"advantage": {"kind": "grpo"}}, optimizer={"lr": 1e-3})
    assert answers.asked == 1 and again == {**first, "eval/seconds": again["eval/seconds"]}
    (file,) = kept_files()
    assert [file] == list(cache_folder().iterdir())  # nothing is left beside it
    assert said == [f"evaluation of the start: responses taken from {file} (eval.cache: false samples new ones)"]
    evaluate(answers, eval={"data": "x", "every": 2, "cache": False})
    evaluate(answers, step=2)
    assert answers.asked == 3 and [file] == kept_files()


def test_kept_responses_are_scored_by_the_present_function(evaluate):
    evaluate(Answers())
    stricter = Answers(right=lambda prompt, text: prompt.answer == "1")
    assert evaluate(stricter)[0]["eval/pass@1"] == pytest.approx(1 / 3) and not stricter.asked


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"prompts": [*PROMPTS[:2], Prompt("p2", text="?", answer="2", tokens=[5, 9])]},
        {"eval": {"data": "x", "every": 2, "temperature": 0.5}},
        {"rollout": {"server_args": ["--kv-cache-dtype", "fp8_e5m2"]}},
        "weights",
    ],
)
def test_another_evaluation_is_another_one(evaluate, other):
    answers = Answers()
    evaluate(answers)
    if other == "weights":  # of the same size
        weights = evaluate.model / "model.safetensors"
        weights.write_bytes(b"weights" * 999 + b"weightz")
        os.utime(weights, (2e9, 2e9))
    assert not evaluate(answers, **(other if isinstance(other, dict) else {}))[1]
    assert answers.asked == 2 and len(kept_files()) == 2


@pytest.mark.parametrize("damage", [lambda text: text[:-20], lambda text: text.partition("\n")[2]])
def test_a_damaged_file_is_named_and_written_anew(evaluate, damage):
    answers = Answers()
    first, _ = evaluate(answers)
    (file,) = kept_files()
    whole = file.read_text()
    file.write_text(damage(whole))
    summary, (line,) = evaluate(answers)
    assert line.startswith(f"warning: a kept evaluation is not used: {file}")
    assert answers.asked == 2 and summary["eval/pass@1"] == first["eval/pass@1"]
    assert file.read_text() == whole.replace("of 1", "of 2")


def test_failed_responses_are_not_kept(evaluate):
    answers = Answers(finish="abort")
    evaluate(answers)
    evaluate(answers)
    assert answers.asked == 2


def test_a_folder_that_cannot_be_written_ends_no_run(evaluate):
    cache_folder().write_text("a file")
    summary, (line,) = evaluate(Answers())
    assert summary["eval/pass@1"] == 1.0 and "warning: the evaluation of the start is not kept for other runs" in line


def test_responses_of_somebody_elses_servers_are_not_kept(evaluate):
    answers, rollout = Answers(), {"placement": "external", "urls": ["http://127.0.0.1:9"]}
    evaluate(answers, rollout=rollout)
    evaluate(answers, rollout=rollout)
    assert answers.asked == 2 and not cache_folder().exists()
