"""The example agents' figures: the table of docs/agents.md is that of benchmarks/results/agents.json."""

import json
import sys
from pathlib import Path

import demo
import example_agents as agents
import pytest

ROOT = Path(__file__).parents[2]
RESULTS = {
    "machine": {"cores": 2, "load average before": 0.25},
    "set-up seconds": 150.0,
    "examples": {
        "calculator": {
            "steps": 20,
            "problems": 256,
            "pass@1 before": 0.3,
            "pass@1 after": 0.9,
            "gain": [0.6, 0.55, 0.65],
            "seconds": {"task": 6.0, "warm-up": 240.0, "RL": 180.0},
        }
    },
}


def test_the_page_has_the_table_of_the_results_and_the_commands_that_were_run():
    results, (begin, end) = json.loads(agents.RESULTS.read_text(encoding="utf-8")), demo.marks("agents")
    page = agents.PAGE.read_text(encoding="utf-8")
    assert page.count(begin + agents.page_part(results) + end) == 1
    assert set(results["examples"]) == set(agents.EXAMPLES)
    for name in agents.EXAMPLES:
        assert f"tools/{name}_task.py runs/{name}/task\n" in page
        assert f"dynamo-megatron sft configs/{name}/warmup.yaml --ranks 2\n" in page
        assert f"dynamo-megatron train configs/{name}/rl.yaml configs/methods/dynamo.yaml\n" in page


def test_both_examples_learn():
    results = json.loads(agents.RESULTS.read_text(encoding="utf-8"))
    for made in results["examples"].values():
        assert made["gain"][1] > 0 and made["gain"][0] == pytest.approx(made["pass@1 after"] - made["pass@1 before"])


def test_a_row_says_before_after_and_the_interval():
    lines = agents.page_part(RESULTS).splitlines()
    cells = [cell.strip() for cell in lines[4].strip("|").split("|")]
    assert cells == ["calculator", "256", "30.0", "90.0", "+60.0 (+55.0 to +65.0)", "7.1"]
    assert lines[0].startswith("Results of `make agents-figures` on 2 CPU cores (load average before the start: 0.2)")
    assert lines[-1].endswith("took 2.5 minutes in a fresh clone.")


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", agents.EXAMPLES)
def test_the_commands_make_a_task_and_train_on_it(name, tmp_path):
    for folder in ("configs", "tools"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    made = agents.example(tmp_path, Path(sys.executable), name, ["trainer.steps=2"])
    assert made["steps"] == 2 and made["problems"] > 100 and set(made["seconds"]) == {"task", "warm-up", "RL"}
    mean, low, high = made["gain"]
    assert low <= mean <= high


def test_a_command_that_fails_ends_it_with_its_output(tmp_path):
    with pytest.raises(SystemExit, match="no such thing"):
        agents.seconds_of(["sh", "-c", "echo no such thing; exit 3"], tmp_path, tmp_path / "logs" / "log")
