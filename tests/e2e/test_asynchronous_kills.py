"""A run whose servers work ahead of its ranks, killed again and again."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from dynamo_megatron.checkpoint.folder import latest_checkpoint
from dynamo_megatron.replay.recording import read_run
from dynamo_megatron.replay.what_if import allocator_of, first_difference, replay
from dynamo_megatron.rollout.store import read_lines, read_rollouts, step_file, step_files
from dynamo_megatron.types import Rollout

pytestmark = pytest.mark.full
KILLS = 2
# Responses of up to 220 tokens, of which an untrained model ends one in a hundred: they last for several steps.
AHEAD = ("rollout.max_new_tokens=220", "algorithm.rollout_correction.kind=truncate", "optimizer.lr=1e-3")


def sampled_by(rollout: Rollout, version: int) -> list[int]:
    """Tokens of the response that weights up to `version` have sampled, before any newer ones."""
    prompt, end = rollout.response_mask.count(0), 0
    for own, _, last in rollout.weight_versions:
        if own > version:
            break
        end = last
    return rollout.tokens[prompt : prompt + end]


def left(output: Path) -> dict[str, tuple[list[int], bool]]:
    """Of each response on disk that the checkpoint knows nothing of: what the weights up to the checkpoint have sampled
    of it, and whether that is all of it."""
    found = latest_checkpoint(output / "checkpoints")
    saved, kept = (found[0] if found else 0), {}
    for step, path in step_files(output).items():
        for rollout in read_lines(path) if step > saved else ():
            tokens = sampled_by(rollout, saved)
            whole = rollout.status == "ok" and len(tokens) == sum(rollout.response_mask)
            if whole or len(tokens) >= len(kept.get(rollout.rollout_id, ([], False))[0]):
                kept[rollout.rollout_id] = tokens, whole
    return kept


@pytest.mark.timeout(2400)
def test_a_run_killed_again_and_again_generates_nothing_twice(workspace, start_run, step_lines, problems_on_disk):
    output, rng = workspace / "ahead-killed", random.Random(0)
    steps = ("trainer.steps=400", "checkpoint.every=3", "checkpoint.keep_last=1", "rollout.max_staleness=2")
    command = (workspace / "config.yaml", *AHEAD, *steps, f"output_dir={output}")
    continued = whole = 0
    for _ in range(KILLS):
        run = start_run(workspace, *command)
        done = len(step_lines(output))
        run.wait_until(lambda done=done: len(step_lines(output)) > done, "a step more")
        time.sleep(rng.uniform(0.0, 3.0))
        run.kill()
        assert run.left_behind() == []
        kept = left(output)
        run = start_run(workspace, *command)
        last = max((int(name[:6]) for name in kept), default=0)
        run.wait_until(lambda last=last: len(step_lines(output)) >= last, f"step {last} again")
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 75, run.text[-3000:]
        for step in {int(name[:6]) for name in kept}:
            final = {r.rollout_id: r for r in read_rollouts(step_file(output, step))}
            for name in (n for n in kept if int(n[:6]) == step):
                tokens, complete = kept[name]
                rollout = final[name]
                response = rollout.tokens[rollout.response_mask.count(0) :]
                assert response == tokens if complete else response[: len(tokens)] == tokens, name
                continued += bool(tokens) and not complete
                whole += complete
    print(f"{whole} finished rollouts were used again, {continued} begun ones continued")
    assert whole + continued > KILLS  # how many of each depends on the machine
    done = len(step_lines(output))
    assert problems_on_disk(output, range(1, done + 1)) == []
    record = read_run(output)
    assert first_difference(record.steps, replay(record.steps, allocator_of(record))) is None
