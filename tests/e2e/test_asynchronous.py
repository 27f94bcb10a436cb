"""Runs whose servers work ahead of their ranks, with real servers: versions, evaluations, and servers that are lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from background_run import json_lines
from transformers import AutoModelForCausalLM

from dynamo_megatron.checkpoint.safetensors_folder import every_export
from dynamo_megatron.rollout.store import read_rollouts, step_file
from dynamo_megatron.types import Rollout

pytestmark = pytest.mark.full
# Responses of up to 220 tokens, of which an untrained model ends one in a hundred: they last for several steps.
AHEAD = ("rollout.max_new_tokens=220", "algorithm.rollout_correction.kind=truncate", "optimizer.lr=1e-2")


@pytest.fixture(scope="module")
def ahead(workspace, start_run, tiny_model) -> tuple[Path, dict[int, torch.nn.Module]]:
    """(output, the model of each version) of 10 steps at a bound of 2, whose weights change a lot in each of them."""
    output = workspace / "ahead"
    exports = ("checkpoint.every=1", "checkpoint.keep_last=1", "checkpoint.export_hf=every", "trainer.steps=10")
    evaluation = (f"eval.data={workspace / 'problems.jsonl'}", "eval.every=3", "eval.samples=2")
    command = (workspace / "config.yaml", *AHEAD, *exports, *evaluation, "rollout.max_staleness=2")
    run = start_run(workspace, *command, f"output_dir={output}")
    assert run.wait(400) == 0, run.text[-3000:]
    models = {step: AutoModelForCausalLM.from_pretrained(every_export(output, step)) for step in range(1, 10)}
    return output, {0: AutoModelForCausalLM.from_pretrained(tiny_model), **models}


def largest_gap(rollout: Rollout, models: dict[int, torch.nn.Module], shift: int = 0) -> float:
    """Nats, between the engine's logprobs and those of the weights that the rollout names (`shift`: other ones)."""
    tokens, prompt, gap = torch.tensor([rollout.tokens]), rollout.response_mask.count(0), 0.0
    for version, start, end in rollout.weight_versions:
        with torch.no_grad():
            logprobs = models[max(0, version + shift)](tokens).logits[0, prompt - 1 : -1].log_softmax(-1)
        own = logprobs.gather(1, tokens[0, prompt:, None])[start:end, 0]
        gap = max(gap, (own - torch.tensor(rollout.engine_logprobs[start:end])).abs().max().item())
    return gap


def test_each_token_has_the_logprob_of_the_weights_that_it_names(ahead, step_lines):
    output, models = ahead
    rollouts = [r for step in range(1, 11) for r in read_rollouts(step_file(output, step))]
    mixed = [r for r in rollouts if len(r.weight_versions) > 1]
    gaps = [largest_gap(r, models) for r in rollouts]
    print(f"{len(rollouts)} rollouts, {len(mixed)} of several versions, largest gap {max(gaps):.2g}")
    assert max(gaps) <= 1e-4 and len(mixed) > 20
    assert min(largest_gap(r, models, shift=1) for r in mixed if r.weight_versions[-1][0] < 9) > 1e-2
    rows = step_lines(output)
    assert [row["rollout/staleness_max"] for row in rows] == [min(row["step"] - 1, 2) for row in rows]
    assert all(row["rollout/dropped"] == 0 and row.get("rollout/logprob_gap_max", 0.0) <= 1e-4 for row in rows)
    assert sum(row["rollout/mixed_versions"] > 0 for row in rows) > 2

    assert [row["step"] for row in json_lines(output / "evaluations.jsonl")] == [0, 3, 6, 9, 10]


@pytest.mark.timeout(1200)
def test_a_server_killed_breaks_no_bound(workspace, start_run, step_lines, problems_on_disk):
    output = workspace / "ahead-hurt"
    options = ("trainer.steps=20", "rollout.max_staleness=2", "rollout.servers=2", f"output_dir={output}")
    run = start_run(workspace, workspace / "config.yaml", *AHEAD, *options)
    run.wait_until(lambda: len(step_lines(output)) >= 5, "five steps")
    run.kill_server("server-1")
    assert run.wait(900) == 0, run.text[-3000:]
    rows = step_lines(output)
    assert len(rows) == 20 and all(row["rollout/dropped"] == 0 for row in rows)
    assert max(row["rollout/staleness_max"] for row in rows) == 2
    assert problems_on_disk(output, range(1, 21)) == [] and "server-1 left the rotation" in run.text
    assert run.left_behind() == []
