"""Runs whose servers work ahead of their ranks: versions, evaluations, and servers and runs that are killed."""

from __future__ import annotations

import random
import re
import signal
import time
from pathlib import Path

import pytest
from background_run import AHEAD, engine_gap, json_lines, step_lines
from transformers import AutoModelForCausalLM

from dynamo_megatron.checkpoint.folder import latest_checkpoint
from dynamo_megatron.checkpoint.safetensors_folder import every_export
from dynamo_megatron.replay.recording import read_run
from dynamo_megatron.replay.what_if import allocator_of, first_difference, replay
from dynamo_megatron.rollout.store import read_lines, read_rollouts, step_file, step_files

pytestmark = pytest.mark.full
KILLS = 2


@pytest.mark.timeout(1200)
def test_each_token_has_the_logprob_of_the_weights_that_it_names(workspace, start_run, problems_on_disk, tiny_model):
    """10 steps whose weights change a lot in each; one of two servers is killed in the middle."""
    output = workspace / "ahead"
    keys = ("optimizer.lr=1e-2", "checkpoint.every=1", "checkpoint.keep_last=1", "checkpoint.export_hf=every")
    keys += ("trainer.steps=10", "rollout.servers=2", f"output_dir={output}")
    keys += (f"eval.data={workspace / 'problems.jsonl'}", "eval.every=3", "eval.samples=2")
    run = start_run(workspace, workspace / "config.yaml", *AHEAD, *keys)
    run.wait_until(lambda: len(step_lines(output)) >= 5, "five steps", 600)
    run.kill_server("server-1")
    assert run.wait(600) == 0, run.text[-3000:]
    assert "server-1 left the rotation" in run.text and run.left_behind() == []

    models = {step: AutoModelForCausalLM.from_pretrained(every_export(output, step)) for step in range(1, 10)}
    models[0] = AutoModelForCausalLM.from_pretrained(tiny_model)
    rollouts = [r for step in range(1, 11) for r in read_rollouts(step_file(output, step))]
    mixed = [r for r in rollouts if len(r.weight_versions) > 1]
    gaps = [engine_gap(r, models) for r in rollouts]
    print(f"{len(rollouts)} rollouts, {len(mixed)} of several versions, largest gap {max(gaps):.2g}")
    assert max(gaps) <= 1e-4 and len(mixed) > 20
    assert min(engine_gap(r, models, shift=1) for r in mixed if r.weight_versions[-1][0] < 9) > 1e-2
    rows = step_lines(output)
    stalest = [row["rollout/staleness_max"] for row in rows]
    assert stalest[:5] == [0, 1, 2, 2, 2] and max(stalest) == 2
    assert all(row["rollout/dropped"] == 0 and row.get("rollout/logprob_gap_max", 0.0) <= 1e-4 for row in rows)
    assert sum(row["rollout/mixed_versions"] > 0 for row in rows) > 2 and problems_on_disk(output, range(1, 11)) == []
    assert [row["step"] for row in json_lines(output / "evaluations.jsonl")] == [0, 3, 6, 9, 10]


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


def newest_step(run) -> int:
    """That this start of the run has done."""
    return max(map(int, re.findall(r"^step +(\d+)/", run.text, re.MULTILINE)), default=0)


@pytest.mark.timeout(2400)
def test_a_run_killed_again_and_again_reuses_all_that_was_finished(workspace, start_run, problems_on_disk):
    output, rng, used = workspace / "ahead-killed", random.Random(0), 0
    keys = ("optimizer.lr=1e-3", "trainer.steps=400", "checkpoint.every=3", "checkpoint.keep_last=1")
    command = (workspace / "config.yaml", *AHEAD, *keys, f"output_dir={output}")
    for _ in range(KILLS):
        run = start_run(workspace, *command)
        done = len(step_lines(output))
        run.wait_until(lambda done=done: len(step_lines(output)) > done, "a step more")
        time.sleep(rng.uniform(0.0, 3.0))
        run.kill()
        assert run.left_behind() == []
        kept = left(output)
        run = start_run(workspace, *command)
        last = max((int(name[:6]) for name in kept), default=1)
        run.wait_until(lambda run=run, last=last: newest_step(run) >= last, f"step {last} again")
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 75, run.text[-3000:]
        for step in {int(name[:6]) for name in kept}:
            final = {r.rollout_id: r for r in read_rollouts(step_file(output, step))}
            for name in (n for n in kept if int(n[:6]) == step):
                assert final[name].response_tokens == kept[name], name
                used += 1
    print(f"{used} finished rollouts were used again")
    assert problems_on_disk(output, range(1, len(step_lines(output)) + 1)) == []
    record = read_run(output)
    assert first_difference(record.steps, replay(record.steps, allocator_of(record))) is None
