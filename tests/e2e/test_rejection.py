"""Rollouts that are not what they are said to be, in a recorded run: no weight, group or statistic learns from them."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dynamo_megatron.data.templates import load_tokenizer
from dynamo_megatron.records import Rollout
from dynamo_megatron.rollout.result import group_id, rollout_id
from dynamo_megatron.rollout.store import RolloutStore

STEPS, GROUP, RESPONSE = 2, 16, 12


@pytest.fixture(scope="module")
def rollouts(workspace, tiny_model) -> list[Rollout]:
    """Random responses with the logprobs that the untrained model gives them: the policy's own, to rounding."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model), load_tokenizer(tiny_model)
    rng, made = np.random.default_rng(0), []
    problems = [json.loads(line) for line in (workspace / "problems.jsonl").read_text().splitlines()]
    for step in range(1, STEPS + 1):
        for i, problem in enumerate(problems):
            prompt = tokenizer.encode(problem["problem"] + "\n")
            responses = rng.integers(5, 100, (GROUP, RESPONSE))
            tokens = torch.tensor([prompt + r.tolist() for r in responses])
            with torch.no_grad():
                logprobs = model(tokens).logits.log_softmax(-1)[:, len(prompt) - 1 : -1]
            chosen = logprobs.gather(2, tokens[:, len(prompt) :, None])[..., 0]
            for k in range(GROUP):
                right = bool(rng.random() < 0.5)
                made.append(
                    Rollout(
                        rollout_id=rollout_id(group_id(step, 1000 + i), k),
                        group_id=group_id(step, 1000 + i),
                        prompt_id=problem["id"],
                        step=step,
                        tokens=tokens[k].tolist(),
                        response_mask=[0] * len(prompt) + [1] * RESPONSE,
                        engine_logprobs=chosen[k].tolist(),
                        weight_versions=[(step - 1, 0, RESPONSE)],
                        finish_reason="length",
                        reward=float(right),
                        success=right,
                        reward_parts={},
                        server=f"server-{k % 2}",
                    )
                )
    return made


@pytest.fixture(scope="module")
def replay(workspace, command_line, rollouts):
    """replay(name, change, *keys) -> (exit code, output, folder) of a run on the rollouts that `change` has made."""

    def run(name: str, change, *keys: str) -> tuple[int, str, Path]:
        record, output = workspace / f"{name}-record", workspace / name
        store = RolloutStore(record)
        for rollout in rollouts:
            store.append(change(rollout))
        store.close()
        keys = (f"trainer.steps={STEPS}", "optimizer.lr=1e-4", "rollout.engine=recorded", *keys)
        code, text = command_line(
            workspace, "train", workspace / "config.yaml", *keys, f"rollout.recorded={record}", f"output_dir={output}"
        )
        return code, text, output

    return run


def asked_for(rollout: Rollout) -> str:
    """The problem, the step and the index of a recorded rollout."""
    return f"{rollout.prompt_id}/{rollout.step}/{rollout.rollout_id[-3:]}"


def garble(rollout: Rollout) -> Rollout:
    """Garbage, an old weight version and NaN, one of each in step 1 and garbage in step 2."""
    match asked_for(rollout):
        case "problem-0/1/001" | "problem-2/2/000":
            return dataclasses.replace(rollout, engine_logprobs=[-0.1] * RESPONSE)
        case "problem-1/1/000":
            return dataclasses.replace(rollout, weight_versions=[(0, 0, 4), (3, 4, RESPONSE)])
        case "problem-3/1/001" | "problem-0/2/001":
            return dataclasses.replace(rollout, engine_logprobs=[float("nan")] * RESPONSE)
    return rollout


def left_out(rollout: Rollout) -> Rollout:
    return rollout if garble(rollout) is rollout else dataclasses.replace(rollout, status="rejected")


def rows(output: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (output / name).read_text().splitlines()]


def test_they_are_rejected_counted_and_explained(replay):
    code, text, output = replay("garbled", garble)
    assert code == 0, text[-3000:]
    metrics = rows(output, "metrics.jsonl")
    assert metrics[0]["rollout/rejected"] > 0 and all(m["rollout/logprob_gap_max"] < 0.1 for m in metrics)
    assert "rollouts rejected (" in text and "of server-" in text


@pytest.mark.full
def test_training_is_as_if_they_had_not_come(replay):
    runs = [replay("as-garbled", garble), replay("as-left-out", left_out)]
    assert all(code == 0 for code, *_ in runs), [text[-2000:] for _, text, _ in runs]
    one, other = (output for *_, output in runs)
    timeless = [
        [{k: v for k, v in m.items() if not k.startswith(("time/", "throughput/", "resources/"))} for m in metrics]
        for metrics in (rows(one, "metrics.jsonl"), rows(other, "metrics.jsonl"))
    ]
    assert timeless[0] == timeless[1] and rows(one, "allocation.jsonl") == rows(other, "allocation.jsonl")
    weights = [
        {n: t for f in sorted((o / "hf").glob("*.safetensors")) for n, t in load_file(f).items()} for o in (one, other)
    ]
    assert weights[0].keys() == weights[1].keys() and all(torch.equal(t, weights[1][n]) for n, t in weights[0].items())


@pytest.mark.full
def test_too_many_end_the_run_with_one_line(replay):
    code, text, _ = replay("over", garble, "rollout.proof.max_rejected_share=0.01")
    assert code == 1
    last = text.strip().splitlines()[-1]
    assert "rollouts rejected" in last and "more than rollout.proof.max_rejected_share (0.01)" in last
