"""Recorded rollouts repeat a run bit for bit, killed or not."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

KILL_AFTER = 8  # steps


def outcome(output: Path) -> tuple[dict, dict[str, torch.Tensor], dict]:
    """(the last metrics line but for times, the final weights, rank 0's state of the last checkpoint)."""
    line = json.loads((output / "metrics.jsonl").read_text().splitlines()[-1])
    plain = {key: value for key, value in line.items() if not key.startswith(("time/", "throughput/"))}
    weights = {}
    for file in (output / "push").glob("*.safetensors"):
        with safe_open(file, "pt") as f:
            weights.update({name: f.get_tensor(name) for name in f.keys()})  # noqa: SIM118
    last = sorted((output / "checkpoints").glob("step-*"))[-1]
    return plain, weights, json.loads((last / "state.json").read_text())


@pytest.fixture(scope="module")
def recorded(live, workspace):
    def command(name: str) -> tuple:
        source = [f"rollout.recorded={live[0]}", "rollout.engine=recorded"]
        return (workspace / "config.yaml", *source, f"output_dir={workspace / name}")

    return command


@pytest.fixture(scope="module")
def straight(recorded, workspace, start_run):
    run = start_run(workspace, *recorded("straight"))
    assert run.wait() == 0, run.text[-3000:]
    return outcome(workspace / "straight")


def same(a, b) -> None:
    assert a[0] == b[0]
    assert a[1].keys() == b[1].keys() and all(torch.equal(a[1][name], b[1][name]) for name in a[1])
    assert a[2] == b[2]


def test_killed_and_resumed_equals_the_straight_run(recorded, straight, workspace, start_run, step_lines, steps):
    output = workspace / "killed"
    run = start_run(workspace, *recorded("killed"))
    run.wait_until(lambda: len(step_lines(output)) >= KILL_AFTER, f"{KILL_AFTER} steps")
    run.kill()
    assert run.left_behind(within=30) == []
    done = len(step_lines(output))
    assert done < steps, "the kill came too late to mean anything"
    again = start_run(workspace, *recorded("killed"))
    assert again.wait() == 0, again.text[-3000:]
    assert "resumed from" in again.text
    assert [row["step"] for row in step_lines(output)] == list(range(1, steps + 1))
    same(outcome(output), straight)


def test_the_live_run_that_was_killed_equals_its_replay(live, straight):
    metrics, weights, state = outcome(live[0])
    replay = {**straight[0], "rollout/reused": metrics["rollout/reused"]}
    same((metrics, weights, state), (replay, straight[1], straight[2]))


def test_an_output_folder_of_another_run_is_refused(recorded, straight, workspace, start_run):
    before = (workspace / "straight" / "metrics.jsonl").read_text()
    run = start_run(workspace, *recorded("straight"), "algorithm.advantage.kind=grpo", "data.shuffle_seed=3")
    assert run.wait() == 2
    assert run.text.splitlines()[-1].endswith(
        "holds a run with another algorithm.advantage.kind, data.shuffle_seed; name another folder"
    )
    assert (workspace / "straight" / "metrics.jsonl").read_text() == before
