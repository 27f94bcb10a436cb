"""Two runs of one command: on a CPU they sample the same responses, whatever the servers make of their order."""

import pytest
from background_run import same_weights

from dynamo_megatron.evaluation.results import read_results, results_file
from dynamo_megatron.rollout.store import read_rollouts, step_file


@pytest.mark.full
def test_the_same_command_samples_the_same_responses_and_ends_in_the_same_weights(workspace, command_line):
    """With one server, and with two that get few requests at once."""
    rollouts, evaluated, outputs = [], [], (workspace / "seed-one", workspace / "seed-two")
    for output, servers in zip(outputs, ((), ("rollout.servers=2", "rollout.concurrency=3")), strict=True):
        keys = (f"eval.data={workspace / 'problems.jsonl'}", "eval.samples=4", "eval.every=2", "trainer.steps=2")
        command = ("train", workspace / "config.yaml", *keys, *servers, f"output_dir={output}")
        code, text = command_line(workspace, *command)
        assert code == 0, text[-3000:]
        found = [r for step in (1, 2) for r in read_rollouts(step_file(output, step))]
        rollouts.append({r.rollout_id: (r.prompt_id, r.tokens, r.reward) for r in found})
        results = [r for step in (0, 2) for r in read_results(results_file(output, step))]
        evaluated.append([(r.prompt_id, r.responses) for r in results])
    assert rollouts[0] == rollouts[1] and evaluated[0] == evaluated[1]
    assert same_weights(*(output / "hf" for output in outputs))
