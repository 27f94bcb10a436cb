"""Two runs of one command: on a CPU they sample the same responses, whatever the servers make of their order."""

import pytest
from background_run import same_weights

from dynamo_megatron.evaluation.results import read_results, results_file
from dynamo_megatron.rollout.store import read_rollouts, step_file

pytestmark = pytest.mark.full
STEPS = 2


@pytest.fixture(scope="module")
def runs(workspace, command_line):
    """Folders of the same run with one server, and with two that get few requests at once."""
    found = {}
    for name, keys in (("seed-one", ()), ("seed-two", ("rollout.servers=2", "rollout.concurrency=3"))):
        output = workspace / name
        evaluation = (f"eval.data={workspace / 'problems.jsonl'}", "eval.samples=4", "eval.every=2")
        code, text = command_line(
            workspace,
            "train",
            workspace / "config.yaml",
            f"trainer.steps={STEPS}",
            *evaluation,
            *keys,
            f"output_dir={output}",
        )
        assert code == 0, text[-3000:]
        found[name] = output
    return found


def responses(output, step):
    return {r.rollout_id: (r.prompt_id, r.tokens, r.reward) for r in read_rollouts(step_file(output, step))}


def test_the_same_command_samples_the_same_responses(runs):
    one, two = runs.values()
    for step in range(1, STEPS + 1):
        assert responses(one, step) == responses(two, step)
    for step in range(0, STEPS + 1, 2):
        rows = [[(r.prompt_id, r.responses) for r in read_results(results_file(o, step))] for o in (one, two)]
        assert rows[0] == rows[1]


def test_the_same_command_ends_in_the_same_weights(runs):
    assert same_weights(*(output / "hf" for output in runs.values()))
