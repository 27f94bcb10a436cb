"""Runs on recorded rollouts with rewards of steps, PRIME's, a critic or a teacher: resumed they give the same."""

import json

import numpy as np
import pytest
import torch
import yaml
from background_run import Sampler, made_rollout, same_weights, step_lines, timeless
from transformers import AutoModelForCausalLM

from dynamo_megatron.checkpoint.inspection import describe, differences, inspect
from dynamo_megatron.rollout.store import RolloutStore, read_rollouts, step_file, tokens_file
from dynamo_megatron.tracking.token_rows import read_token_rows

pytestmark = pytest.mark.full
STEPS, PROMPTS, GROUP, RESPONSE = 4, 8, 4, 6


def record(folder, model_path) -> None:
    """A group of every prompt in every step, half of it right; every response has two steps."""
    sampler, store = Sampler(model_path), RolloutStore(folder)
    for step in range(1, STEPS + 1):
        for i in range(PROMPTS):
            prompt, group = sampler.group(f"Problem {i}.\n", GROUP, RESPONSE)
            for k, (response, logprobs) in enumerate(group):
                steps = [(0, 2, float(sampler.rng.normal())), (2, RESPONSE, float(sampler.rng.normal()))]
                others = {"engine_logprobs": logprobs, "right": k % 2, "step_rewards": steps}
                store.append(made_rollout(step, i, k, f"problem-{i}", prompt, response, **others))
    store.close()


@pytest.fixture(scope="module")
def run(make_tiny_model, tmp_path_factory, start_run):
    """run(name, *keys): the run's metrics and the folder of its weights."""
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
        return list(map(timeless, step_lines(output))), output / "hf"

    go.folder = folder
    return go


NONE = "reward={functions: [math], prime: {model: null}}"
PPO = (NONE, "algorithm.advantage={kind: gae, process: {weight: 0.1, gamma: 1.0}}", "algorithm.modulation=null")
PPO += ("critic={warmup_steps: 1, optimizer: {lr: 1.0e-3, warmup_steps: 0}}", "parallel.pp=2")


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("rewards", ()),
        ("adapters", ("model.lora={rank: 4}", "algorithm.kl.coef=0.1", "optimizer.lr=1e-3")),
        ("critic", PPO),  # in the first step it alone learns
    ],
)
def test_a_resumed_run_is_as_the_straight_one(run, name, keys):
    straight, weights = run(name, *keys, f"trainer.steps={STEPS}")
    run(f"{name}-cut", *keys, "trainer.steps=2")
    resumed, again = run(f"{name}-cut", *keys, f"trainer.steps={STEPS}")
    assert resumed == straight and len(straight) == STEPS and same_weights(weights, again)
    last = [inspect(run.folder / output / "checkpoints" / f"step-{STEPS:06d}") for output in (name, f"{name}-cut")]
    assert list(differences(*last)) == []
    first, second, *_, final = straight
    match name:
        case "rewards":
            assert all(row["reward/steps"] != 0 and row["reward/prime"] != 0 for row in straight)
        case "adapters":  # without them the policy is the reference, from which it begins
            assert first["policy/kl"] == 0 != final["policy/kl"]
            assert all(".adapter." in tensor for tensor in last[0].tensors.names)
        case "critic":
            assert "critic: " in describe(last[0])
            assert [row["policy/skipped_updates"] for row in straight] == [1, 0, 0, 0]
            assert first["critic/value"] == 0 != second["critic/value"]
            assert first["critic/explained_variance"] == 0 != final["critic/explained_variance"]


def test_a_teacher_on_a_server_may_have_another_width_and_depth(
    run, make_tiny_model, tiny_model, sglang_server, monkeypatch
):
    """Of the policy's vocabulary, 2 layers of 64 beside 3 of 96: each token's advantage is the gap of the logprobs."""
    monkeypatch.setenv("TEACHER_KEY", sglang_server.endpoint.api_key)
    path = make_tiny_model(run.folder / "wide", dtype="float32", layers=3, hidden=96, ffn=160, seed=2)
    record(run.folder / "wide-record", path)
    url = sglang_server.endpoint.url
    keys = [f"model.path={path}", f"rollout.recorded={run.folder / 'wide-record'}", "trainer.steps=1"]
    keys += [NONE, "algorithm.modulation=null"]
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
