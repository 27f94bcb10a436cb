"""A run that chooses the shape of its batches, killed and resumed: the same shapes, the same weights."""

import json

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dynamo_megatron.algorithm.batch_shape import PATIENCE
from dynamo_megatron.checkpoint.folder import read_state
from dynamo_megatron.data.templates import load_tokenizer
from dynamo_megatron.replay.recording import read_run
from dynamo_megatron.rollout.result import group_id, rollout_id
from dynamo_megatron.rollout.store import RolloutStore
from dynamo_megatron.types import Rollout

pytestmark = pytest.mark.full
STEPS, PROMPTS, GROUP, RESPONSE = PATIENCE + 6, 48, 8, 4


def record(folder, model_path) -> None:
    """Two groups of every prompt in every step: at the end of an epoch it may be drawn twice. Gradients differ from
    prompt to prompt, half of which are always right, half always wrong, each with three tokens to answer with."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_path), load_tokenizer(model_path)
    rng, store = np.random.default_rng(0), RolloutStore(folder)
    for step in range(1, STEPS + 1):
        for i in range(PROMPTS):
            prompt = tokenizer.encode(f"Problem {i}.\n")
            tokens = torch.tensor([prompt + r.tolist() for r in 5 + i + rng.integers(0, 3, (2 * GROUP, RESPONSE))])
            with torch.no_grad():
                logprobs = model(tokens).logits.log_softmax(-1)[:, len(prompt) - 1 : -1]
            chosen = logprobs.gather(2, tokens[:, len(prompt) :, None])[..., 0]
            for k in range(2 * GROUP):
                group, right = group_id(step, 1000 * (1 + k // GROUP) + i), bool(i % 2)
                store.append(
                    Rollout(
                        rollout_id=rollout_id(group, k % GROUP),
                        group_id=group,
                        prompt_id=f"problem-{i}",
                        step=step,
                        tokens=tokens[k].tolist(),
                        response_mask=[0] * len(prompt) + [1] * RESPONSE,
                        engine_logprobs=chosen[k].tolist(),
                        weight_versions=[(step - 1, 0, RESPONSE)],
                        finish_reason="length",
                        reward=float(right),
                        success=right,
                        reward_parts={},
                    )
                )
    store.close()


@pytest.fixture(scope="module")
def command(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shape")
    record(folder / "record", tiny_model)
    problems = [{"id": f"problem-{i}", "problem": f"Problem {i}.", "answer": ""} for i in range(PROMPTS)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    config = {
        "model": {"path": str(tiny_model), "dtype": "float32", "max_length": 256},
        "data": {
            "source": str(folder / "problems.jsonl"),
            "template": "{prompt}\n",
            "batch_prompts": "auto",
            "shape": {"every": 1, "prompt_cost": 0.0},
        },
        "rollout": {"max_new_tokens": RESPONSE, "engine": "recorded", "recorded": str(folder / "record")},
        "algorithm": {
            "allocation": {"kind": "uniform", "budget": 64, "rollout_n_max": GROUP},
            "advantage": {"kind": "history"},
        },
        "optimizer": {"lr": 1e-6, "warmup_steps": 0},
        "trainer": {"steps": STEPS},
        "checkpoint": {"every": PATIENCE + 1},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return lambda name: (folder, folder / "config.yaml", f"output_dir={folder / name}")


def outcome(output):
    """Metrics without times, weights, rank 0's state but for the allocator's arrays."""
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    timed = ("time/", "throughput/", "resources/")
    rows = [{key: value for key, value in row.items() if not key.startswith(timed)} for row in rows]
    state = read_state(output / "checkpoints" / f"step-{STEPS:06d}")
    weights = {k: v for file in (output / "hf").glob("*.safetensors") for k, v in load_file(file).items()}
    return rows, weights, (state["shape"], state["stream"])


def test_killed_and_resumed_it_chooses_the_same(command, start_run, step_lines):
    straight = start_run(*command("straight"))
    assert straight.wait() == 0, straight.text[-3000:]
    killed = start_run(*command("killed"))
    output = command("killed")[0] / "killed"
    saved = output / "checkpoints" / f"step-{PATIENCE + 1:06d}"
    killed.wait_until(saved.is_dir, "the save after the change")
    killed.kill()
    assert len(step_lines(output)) < STEPS, "the kill came too late to mean anything"
    again = start_run(*command("killed"))
    assert again.wait() == 0, again.text[-3000:]
    assert "resumed from" in again.text
    change = "batch shape: 16 prompts with 4 rollouts each in place of 8 with 8"
    assert change in straight.text and change in killed.text and change not in again.text
    rows, weights, state = outcome(output)
    straight_rows, straight_weights, straight_state = outcome(output.with_name("straight"))
    assert rows == straight_rows and state == straight_state
    prompts = [row["allocation/prompts"] for row in rows]
    assert set(prompts) == {8, 16} and prompts == sorted(prompts) and prompts.count(8) >= PATIENCE
    assert weights and all(torch.equal(weights[name], straight_weights[name]) for name in straight_weights)
    assert len(read_run(output).steps) == STEPS
