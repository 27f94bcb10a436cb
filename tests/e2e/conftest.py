"""Whole runs of `dynamo-megatron train` on two ranks, as a user starts them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from background_run import LIVE_STEPS, Run, Sampler, json_lines, made_rollout, small_run, step_lines

from dynamo_megatron.rollout.store import RolloutStore, step_file
from dynamo_megatron.runtime.line_files import read_raw_lines
from dynamo_megatron.types import Rollout

LOSE_STEP, KILL_STEP = 3, 5
REPLAYED_STEPS, REPLAYED_GROUPS, REPLAYED_GROUP, REPLAYED_RESPONSE = 2, 4, 16, 12  # groups of a prompt; tokens


def rollout_lines(output: Path, step: int) -> list[str]:
    file = step_file(output, step)
    return [line.decode() for line in read_raw_lines(file)] if file.is_file() else []


@pytest.fixture(scope="session")
def workspace(tiny_model, tmp_path_factory) -> Path:
    """Model, problems, reward function and config of a small run."""
    return small_run(tmp_path_factory.mktemp("e2e"), tiny_model, LIVE_STEPS, "aei 7")


@pytest.fixture(scope="session")
def live(workspace) -> tuple[Path, dict]:
    """A live run with two servers: (output folder, what was seen of it).

    One server is killed while it generates. The run is, too, at 90 % of a step's rollouts, and started again.
    """
    output = workspace / "live"
    command = (workspace / "config.yaml", f"output_dir={output}", "rollout.servers=2")
    run = Run(workspace, *command)
    run.wait_until(lambda: len(rollout_lines(output, LOSE_STEP)) >= 2, f"rollouts of step {LOSE_STEP}")
    run.kill_server("server-1")
    run.wait_until(lambda: "server-1 left the rotation" in run.text, "word of the server that was killed")
    run.wait_until(lambda: len(rollout_lines(output, KILL_STEP)) >= 22, f"90 % of the rollouts of step {KILL_STEP}")
    run.kill()
    left, finished = run.left_behind(), rollout_lines(output, KILL_STEP)[:22]
    again = Run(workspace, *command)
    assert again.wait() == 0, again.text[-3000:]
    now = rollout_lines(output, KILL_STEP)
    return output, {"left": left, "step": KILL_STEP, "finished": finished, "now": now, "said": run.text}


@pytest.fixture(scope="session")
def start_run():
    """Run(folder, *arguments), ended with the session if the test did not."""
    started = []

    def start(*arguments, **options) -> Run:
        started.append(Run(*arguments, **options))
        return started[-1]

    yield start
    for run in started:
        if run.process.poll() is None:
            run.kill()


@pytest.fixture(scope="session")
def problems_on_disk():
    """problems_on_disk(output, steps): a line for each step where not every rollout that was allocated is on disk once,
    or where what was not trained is not what the metrics count."""

    def check(output: Path, steps) -> list[str]:
        allocated, rows, found = Counter(), {row["step"]: row for row in step_lines(output)}, []
        for row in json_lines(output / "allocation.jsonl"):
            allocated[row["step"]] += row["n"]
        for step in steps:
            rollouts = list(RolloutStore(output).lines(step))
            final = {r.rollout_id: r.status for r in rollouts}
            twice = max(Counter(r.rollout_id for r in rollouts if r.status != "rejected").values(), default=0) > 1
            lost = sum(status in ("aborted", "failed", "rejected") for status in final.values())
            shares = sum(rows[step][f"rollout/{kind}"] for kind in ("aborted", "failed", "rejected"))
            if len(final) != allocated[step] or twice or lost != round(shares * allocated[step]):
                found.append(f"step {step}: {len(final)} of {allocated[step]} rollouts, {lost} lost, twice: {twice}")
        return found

    return check


@pytest.fixture(scope="session")
def made_rollouts(workspace, tiny_model) -> list[Rollout]:
    """Random responses with the logprobs that the untrained model gives them: the policy's own, to rounding."""
    sampler, made = Sampler(tiny_model), []
    problems = json_lines(workspace / "problems.jsonl") * REPLAYED_GROUPS  # a step may draw a prompt again
    for step in range(1, REPLAYED_STEPS + 1):
        for i, problem in enumerate(problems):
            prompt, group = sampler.group(problem["problem"] + "\n", REPLAYED_GROUP, REPLAYED_RESPONSE)
            for k, (response, logprobs) in enumerate(group):
                others = {"engine_logprobs": logprobs, "server": f"server-{k % 2}", "right": sampler.rng.random() < 0.5}
                made.append(made_rollout(step, 1000 + i, k, problem["id"], prompt, response, **others))
    return made


@pytest.fixture(scope="session")
def replay(workspace, command_line, made_rollouts):
    """replay(name, change, *keys) -> (exit code, output, folder) of a run on the rollouts that `change` has made."""

    def run(name: str, change, *keys: str) -> tuple[int, str, Path]:
        record, output = workspace / f"{name}-record", workspace / name
        store = RolloutStore(record)
        for rollout in made_rollouts:
            store.append(change(rollout))
        store.close()
        keys = (f"trainer.steps={REPLAYED_STEPS}", "optimizer.lr=1e-4", "rollout.engine=recorded", *keys)
        code, text = command_line(
            workspace, "train", workspace / "config.yaml", *keys, f"rollout.recorded={record}", f"output_dir={output}"
        )
        return code, text, output

    return run
