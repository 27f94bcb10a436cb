"""Runs on recorded rollouts with rewards of steps, PRIME's, a critic or a teacher: resumed they give the same."""

import json

import numpy as np
import pytest
import torch
import yaml
from background_run import exported, json_lines, made_rollout, timeless
from transformers import AutoModelForCausalLM

from dynamo_megatron.checkpoint.inspection import describe, differences, inspect
from dynamo_megatron.data.templates import load_tokenizer
from dynamo_megatron.rollout.store import RolloutStore, read_rollouts, step_file, tokens_file
from dynamo_megatron.tracking.token_rows import read_token_rows

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


def test_a_teacher_on_a_server_may_have_another_width_and_depth(
    run, make_tiny_model, tiny_model, sglang_server, monkeypatch
):
    """Of the policy's vocabulary, 2 layers of 64 beside 3 of 96: each token's advantage is the gap of the logprobs."""
    monkeypatch.setenv("TEACHER_KEY", sglang_server.endpoint.api_key)
    path = make_tiny_model(run.folder / "wide", dtype="float32", layers=3, hidden=96, ffn=160, seed=2)
    record(run.folder / "wide-record", path)
    url = sglang_server.endpoint.url
    keys = [f"model.path={path}", f"rollout.recorded={run.folder / 'wide-record'}", "trainer.steps=1"]
    keys += ["reward={functions: [math], prime: {model: null}}", "algorithm.modulation=null"]
    keys += [f"algorithm.teacher={{path: '{url}', api_key_env: TEACHER_KEY, reward_weight: 0.0}}"]
    (row,), _ = run("taught", *keys, "algorithm.advantage.process.weight=0.0", "tracking.token_rollouts=1000")
    models, gaps = [AutoModelForCausalLM.from_pretrained(folder) for folder in (tiny_model, path)], []
    for rollout in read_rollouts(step_file(run.folder / "wide-record", 1)):
        ids = torch.tensor(rollout.tokens)
        with torch.no_grad():
            its, own = (model(ids[None]).logits[0, -RESPONSE - 1 : -1].log_softmax(-1) for model in models)
        gaps.append((its - own).gather(1, ids[-RESPONSE:, None])[:, 0].tolist())
    rows = read_token_rows(tokens_file(run.folder / "taught", 1)).values()  # the run has names of its own for them
    found = sorted(row["advantage"] for row in rows)
    np.testing.assert_allclose(found, sorted(gaps), atol=1e-4)
    assert row["policy/teacher_kl"] == pytest.approx(-np.mean(gaps), abs=1e-5) and np.abs(gaps).max() > 1
