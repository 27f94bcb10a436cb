from dynamo_megatron.config import Config
from dynamo_megatron.evaluation.periodic import PeriodicEvaluation
from dynamo_megatron.evaluation.results import read_results, results_file
from dynamo_megatron.types import ProblemResult, Prompt

PROMPTS = [Prompt(f"p{i}", text="?", answer=str(i), tokens=[5, i]) for i in range(3)]


class Servers:
    """The first problem alone is solved."""

    def evaluate(self, prompts, on_poll, on_count):
        return [
            ProblemResult(p.prompt_id, "", [float(p is prompts[0])], [p is prompts[0]], [4], ["stop"], ["ok"], ["r"])
            for p in prompts
        ]

    def begin_evaluation(self, prompts, on_poll):
        self.begun = prompts

    def end_evaluation(self, on_poll):
        return self.evaluate(self.begun, on_poll, None)


def evaluation(output, steps):
    config = {"model": {"path": "m"}, "data": {"source": "x"}, "output_dir": str(output), "trainer": {"steps": steps}}
    return PeriodicEvaluation(Config(**config, eval={"data": "x", "every": 3}), PROMPTS, Servers())


def test_when_it_is_due(tmp_path):
    assert [step for step in range(6) if evaluation(tmp_path, 5).due(step)] == [0, 3, 5]


def test_results_are_written_and_summarised(tmp_path):
    summary = evaluation(tmp_path, 5).run(3, lambda: None, lambda *_: None)
    assert (summary["step"], summary["eval/pass@1"]) == (3, 1 / 3)
    assert [r.prompt_id for r in read_results(results_file(tmp_path, 3))] == ["p0", "p1", "p2"]
    beside = evaluation(tmp_path, 5)
    beside.begin(3, lambda: None)
    assert beside.under_way == 3
    assert {**beside.end(lambda: None), "eval/seconds": summary["eval/seconds"]} == summary
    assert beside.under_way is None
