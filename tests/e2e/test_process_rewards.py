"""Runs on recorded rollouts with rewards of steps, PRIME's, or a critic: resumed they give the same, and they train."""

import json

import numpy as np
import pytest
import torch
import yaml
from background_run import exported, json_lines, made_rollout, timeless
from transformers import AutoModelForCausalLM

from dynamo_megatron.checkpoint.inspection import describe, differences, inspect
from dynamo_megatron.data.templates import load_tokenizer
from dynamo_megatron.rollout.store import RolloutStore

pytestmark = pytest.mark.full
STEPS, PROMPTS, GROUP, RESPONSE = 4, 8, 4, 6


def record(folder, model_path) -> None:
    """A group of every prompt in every step, half of it right; every response has two steps."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_path), load_tokenizer(model_path)
    rng, store = np.random.default_rng(0), RolloutStore(folder)
    for step in range(1, STEPS + 1):
        for i in range(PROMPTS):
            prompt = tokenizer.encode(f"Problem {i}.\n")
            tokens = torch.tensor([prompt + r.tolist() for r in rng.integers(5, 90, (GROUP, RESPONSE))])
            with torch.no_grad():
                logprobs = model(tokens).logits.log_softmax(-1)[:, len(prompt) - 1 : -1]
            chosen = logprobs.gather(2, tokens[:, len(prompt) :, None])[..., 0]
            for k in range(GROUP):
                steps = [(0, 2, float(rng.normal())), (2, RESPONSE, float(rng.normal()))]
                others = {"engine_logprobs": chosen[k].tolist(), "right": k % 2, "step_rewards": steps}
                response = tokens[k, len(prompt) :].tolist()
                store.append(made_rollout(step, i, k, f"problem-{i}", prompt, response, **others))
    store.close()


@pytest.fixture(scope="module")
def run(make_tiny_model, tmp_path_factory, start_run):
    """run(name, *keys): the run's metrics and weights."""
    folder = tmp_path_factory.mktemp("process")
    models = [make_tiny_model(folder / f"model-{seed}", dtype="float32", seed=seed) for seed in range(2)]
    record(folder / "record", models[0])
    problems = [{"id": f"problem-{i}", "problem": f"Problem {i}.", "answer": "1"} for i in range(PROMPTS)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    config = {
        "model": {"path": str(models[0]), "dtype": "float32", "max_length": 256},
        "data": {"source": str(folder / "problems.jsonl"), "template": "{prompt}\n", "batch_prompts": PROMPTS},
        "rollout": {"max_new_tokens": RESPONSE, "engine": "recorded", "recorded": str(folder / "record")},
        "reward": {"functions": ["math", "prime"], "prime": {"model": str(models[1])}},
        "algorithm": {
            "allocation": {"kind": "uniform", "budget": PROMPTS * GROUP},
            "advantage": {"process": {"gamma": 0.9}},
        },
        "optimizer": {"lr": 1e-6, "warmup_steps": 0},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))

    def go(name: str, *keys: str):
        output = folder / name
        process = start_run(folder, folder / "config.yaml", f"output_dir={output}", *keys)
        assert process.wait() == 0, process.text[-3000:]
        return list(map(timeless, json_lines(output / "metrics.jsonl"))), exported(output / "hf")

    go.folder = folder
    return go


def straight_and_resumed(run, name: str, *keys: str):
    """The metrics and the last checkpoint of a straight run, which are those of one that is cut and resumed."""
    straight, weights = run(name, *keys, f"trainer.steps={STEPS}")
    run(f"{name}-cut", *keys, "trainer.steps=2")
    resumed, again = run(f"{name}-cut", *keys, f"trainer.steps={STEPS}")
    assert resumed == straight and len(straight) == STEPS
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    last = [inspect(run.folder / one / "checkpoints" / f"step-{STEPS:06d}") for one in (name, f"{name}-cut")]
    assert list(differences(*last)) == []
    return straight, last[0]


def test_a_resumed_run_has_the_process_rewards_of_the_straight_one(run):
    straight, _ = straight_and_resumed(run, "straight")
    assert all(row["reward/steps"] != 0 and row["reward/prime"] != 0 for row in straight)


def test_a_resumed_run_has_the_adapters_of_the_straight_one(run):
    """Without them the policy is the reference, from which it begins."""
    keys = ["model.lora={rank: 4}", "algorithm.kl.coef=0.1", "optimizer.lr=1e-3"]
    straight, last = straight_and_resumed(run, "lora", *keys)
    assert straight[0]["policy/kl"] == 0 != straight[-1]["policy/kl"]
    assert all(".adapter." in name for name in last.tensors.names)


def test_a_resumed_run_has_the_critic_of_the_straight_one(run):
    """On two pipeline stages, with process rewards, and a first step in which the critic alone learns."""
    keys = ["reward={functions: [math], prime: {model: null}}", "parallel.pp=2"]
    keys += ["algorithm.advantage={kind: gae, process: {weight: 0.1, gamma: 1.0}}"]
    keys += ["critic={warmup_steps: 1, optimizer: {lr: 1.0e-3, warmup_steps: 0}}", "algorithm.modulation=null"]
    straight, last = straight_and_resumed(run, "ppo", *keys)
    assert "critic: " in describe(last)
    assert [row["policy/skipped_updates"] for row in straight] == [1, 0, 0, 0]
    assert straight[0]["critic/value"] == 0 != straight[1]["critic/value"]
    assert straight[0]["critic/explained_variance"] == 0 != straight[-1]["critic/explained_variance"]
