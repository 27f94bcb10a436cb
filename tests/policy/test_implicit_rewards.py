"""The reward prime on the real model: what transformers computes, and the same update in every layout."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

BETA, TEMPERATURE = 0.2, 0.7
LENGTHS = [
    ("a", 3, 9, 1.0),
    ("a", 3, 4, 0.0),
    ("b", 5, 7, 1.0),
    ("b", 5, 12, 0.0),
    ("b", 5, 1, 1.0),
]  # prompt, response
LAYOUTS = {  # parallel, trainer.micro_batch_tokens
    "one": ({}, 16384),
    "micro-batches": ({}, 16),
    "TP2": ({"tp": 2}, 16384),
    "PP2": ({"pp": 2}, 16),
    "CP2": ({"cp": 2}, 16384),
    "DP2": ({}, 16),
}


def rollouts() -> list[dict]:
    """Some with rewards of steps besides."""
    rng, made = np.random.default_rng(0), []
    for i, (group, prompt, response, reward) in enumerate(LENGTHS):
        made.append(
            {
                "rollout_id": f"{group}-{i}",
                "group_id": group,
                "prompt_id": group,
                "step": 1,
                "tokens": rng.integers(5, 100, prompt + response).tolist(),
                "response_mask": [0] * prompt + [1] * response,
                "engine_logprobs": [-1.0] * response,
                "weight_versions": [(0, 0, response)],
                "finish_reason": "stop",
                "reward": reward,
                "success": reward > 0,
                "reward_parts": {},
                "step_rewards": [(0, 1, 0.5), (1, response, -0.25 * i)] if response > 1 else [],
            }
        )
    return made


@pytest.fixture(scope="module")
def models(make_tiny_model, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: make_tiny_model(root / name, dtype="float32", seed=seed)
        for seed, name in enumerate(("policy", "prm", "reference"))
    }


@pytest.fixture(scope="module")
def results(models, run_script, tmp_path_factory):
    """results(*layouts): what each gave."""

    def run(*layouts: str) -> list[dict]:
        out, cases = tmp_path_factory.mktemp("prime"), []
        for name in layouts:
            parallel, tokens = LAYOUTS[name]
            config = {
                "model": {"path": str(models["policy"]), "dtype": "float32"},
                "data": {"source": "none"},
                "output_dir": "none",
                "parallel": parallel,
                "rollout": {"temperature": TEMPERATURE, "max_new_tokens": 16},
                "trainer": {"micro_batch_tokens": tokens},
                "reward": {
                    "functions": ["math", "prime"],
                    "prime": {"model": str(models["prm"]), "reference": str(models["reference"]), "beta": BETA},
                },
                "algorithm": {
                    "advantage": {"process": {"gamma": 0.9}},
                    "kl": {"coef": 0.1, "reference": str(models["reference"])},
                },
            }
            (out / name).mkdir()
            ranks = 1 if name in ("one", "micro-batches") else 2
            cases.append({"config": config, "rollouts": rollouts(), "ranks": ranks, "out": str(out / name)})
        run_script(Path(__file__).with_name("process_runs.py"), cases, out, 300)
        return [json.loads((out / name / "result.json").read_text()) for name in layouts]

    return run


def logprobs(folder: Path, temperature: float) -> np.ndarray:
    """float64 [R] by transformers."""
    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), []
    for rollout in rollouts():
        tokens, prompt = torch.tensor(rollout["tokens"]), rollout["response_mask"].count(0)
        with torch.no_grad():
            each = torch.log_softmax(model(tokens[None]).logits[0] / temperature, -1)
        found.append(each[prompt - 1 : -1].gather(1, tokens[prompt:, None])[:, 0].double().numpy())
    return np.concatenate(found)


def same(one: dict, other: dict) -> None:
    np.testing.assert_allclose(one["implicit"], other["implicit"], atol=2e-5)
    for mine, theirs in zip(one["updates"], other["updates"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)


def test_prime_is_the_scaled_log_ratio_of_its_two_models_at_temperature_1(results, models):
    one, cut = results("one", "micro-batches")
    expected = BETA * (logprobs(models["prm"], 1.0) - logprobs(models["reference"], 1.0))
    np.testing.assert_allclose(one["implicit"], expected, atol=2e-5)
    np.testing.assert_allclose(one["reference"], logprobs(models["reference"], TEMPERATURE), atol=1e-4)
    assert one["held"] == 2  # the KL term's reference is prime's
    assert one["updates"][0]["grad_norm"] > 0
    same(one, cut)


@pytest.mark.full
def test_every_layout_gives_the_same_rewards_and_the_same_update(results):
    one, *others = results("one", "TP2", "PP2", "CP2", "DP2")
    for other in others:
        same(one, other)
