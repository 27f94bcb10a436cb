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

pytestmark = pytest.mark.full
KILLS = 2
# Responses of up to 220 tokens, of which an untrained model ends one in a hundred: they last for several steps.
AHEAD = ("rollout.max_new_tokens=220", "algorithm.rollout_correction.kind=truncate", "optimizer.lr=1e-3")


def left(output: Path) -> dict[str, list[int]]:
    """The tokens of each finished response on disk that weights up to the checkpoint have sampled, and that the
    checkpoint knows nothing of."""
    found = latest_checkpoint(output / "checkpoints")
    saved, kept = (found[0] if found else 0), {}
    for step, path in step_files(output).items():
        for rollout in read_lines(path) if step > saved else ():
            if rollout.status == "ok" and max(version for version, _, _ in rollout.weight_versions) <= saved:
                kept[rollout.rollout_id] = rollout.response_tokens
    return kept


@pytest.mark.timeout(2400)
def test_a_run_killed_again_and_again_reuses_all_that_was_finished(workspace, start_run, step_lines, problems_on_disk):
    output, rng = workspace / "ahead-killed", random.Random(0)
    steps = ("trainer.steps=400", "checkpoint.every=3", "checkpoint.keep_last=1", "rollout.max_staleness=2")
    command = (workspace / "config.yaml", *AHEAD, *steps, f"output_dir={output}")
    used = 0
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
                assert final[name].response_tokens == kept[name], name
                used += 1
    print(f"{used} finished rollouts were used again")
    done = len(step_lines(output))
    assert problems_on_disk(output, range(1, done + 1)) == []
    record = read_run(output)
    assert first_difference(record.steps, replay(record.steps, allocator_of(record))) is None
