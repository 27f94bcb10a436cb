"""Runs of `train` on forked ranks, whose server is transformers, some with a seeded fault.

    python -P tests/verification/finished_runs.py CASES.json

A case: `folder` (a run's output folder, and its record beside it), `config`, `fault` (a function below, or
stale_server), and `steps`, the end of each start of the run; the fault is in the last one.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "policy"), str(ROOT / "e2e")]
RESPONSE, GROUP = 10, 16  # tokens, rollouts


def run_cases(cases: list[dict[str, Any]]) -> None:
    from forked_ranks import fork_ranks, wait_for

    from dynamo_megatron.policy import backend

    backend.enable_cpu()
    import dynamo_megatron.jobs.train
    import dynamo_megatron.train  # noqa: F401  once

    for case in cases:
        logs = Path(case["folder"]).parent
        for number, steps in enumerate(case["steps"]):
            fault = case["fault"] if number == len(case["steps"]) - 1 else None
            wait_for(fork_ranks(case["config"]["parallel"]["tp"], partial(one_start, case, steps, fault), logs), logs)


def one_start(case: dict[str, Any], steps: int, fault: str | None) -> None:
    from dynamo_megatron.config import Config
    from dynamo_megatron.jobs.run import run_rank
    from dynamo_megatron.jobs.train import TrainJob
    from dynamo_megatron.policy import policy

    torch.set_num_threads(1)
    config = {**case["config"], "trainer": {**case["config"]["trainer"], "steps": steps}}
    serve_with_transformers(config, late=int(fault == "stale_server"))
    if fault not in (None, "stale_server"):
        globals()[fault](policy)
    code = run_rank(TrainJob(Config.model_validate(config)))
    assert code == 0, f"exit code {code}"


def serve_with_transformers(config: dict[str, Any], late: int) -> None:
    """Before a step is read from the record, it is written there: random responses, with their logprobs under the
    weights of the step before. `late`: with those of another step before, from step 3 on."""
    from background_run import made_rollout
    from transformers import AutoModelForCausalLM

    from dynamo_megatron.checkpoint.torch_dist import MegatronFolder
    from dynamo_megatron.data.templates import load_tokenizer
    from dynamo_megatron.models import load_model_config
    from dynamo_megatron.rollout.recorded import RecordedRollouts
    from dynamo_megatron.rollout.store import RolloutStore

    model, record = config["model"]["path"], config["rollout"]["recorded"]
    collect, problems = RecordedRollouts.collect, Path(config["data"]["source"]).read_text().splitlines()

    def served(self, step, *others):
        tokenizer, rng, store = load_tokenizer(model), np.random.default_rng(step), RolloutStore(Path(record))
        net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        if (version := step - 1 - (late if step > 2 else 0)) > 0:
            folder = Path(config["output_dir"]) / "checkpoints" / f"step-{version:06d}"
            saved = MegatronFolder(folder, load_model_config(model))
            for name, parameter in net.named_parameters():
                parameter.data.copy_(saved.get(name))
        for place, line in enumerate([*problems, *problems]):
            problem = json.loads(line)
            prompt = tokenizer.encode(problem["problem"] + "\n")
            responses = rng.integers(5, 100, (GROUP, RESPONSE))
            responses[:, 0] = 0  # padding, which gets no gradient from transformers unless it is told otherwise
            tokens = torch.tensor([prompt + r.tolist() for r in responses])
            with torch.no_grad():
                logs = net(tokens).logits[:, len(prompt) - 1 : -1].log_softmax(-1)
            chosen = logs.gather(2, tokens[:, len(prompt) :, None])[..., 0]
            for k in range(GROUP):
                fields = {"engine_logprobs": chosen[k].tolist(), "right": rng.random() < 0.5, "server": f"s{k % 2}"}
                store.append(made_rollout(step, place, k, problem["id"], prompt, responses[k].tolist(), **fields))
        store.close()
        return collect(self, step, *others)

    RecordedRollouts.collect = served


def lost_micro_batch(policy) -> None:
    run = policy.Policy._run

    def short(self, micro_batches, on_hidden, *, forward_only, **given):
        run(self, micro_batches if forward_only else micro_batches[:-1], on_hidden, forward_only=forward_only, **given)

    policy.Policy._run = short


def change_gradient(policy, name: str, change) -> None:
    """Of the parameter `name`, after it was reduced over the ranks."""
    finalize = policy.finalize_model_grads

    def changed(ddp):
        finalize(ddp)
        change(ddp[0].module.get_parameter(name).main_grad)

    policy.finalize_model_grads = changed


def double_counted_gradient(policy) -> None:
    change_gradient(policy, "decoder.final_layernorm.weight", lambda gradient: gradient.mul_(2))


def swapped_slices(policy) -> None:
    def swap(gradient):
        held = [torch.empty_like(gradient) for _ in range(2)]
        torch.distributed.all_gather(held, gradient.contiguous())
        gradient.copy_(held[1 - torch.distributed.get_rank()])

    change_gradient(policy, "decoder.layers.1.self_attention.linear_proj.weight", swap)


def wrong_divisor(_) -> None:
    from dynamo_megatron import train

    divisors = train.loss_divisors
    train.loss_divisors = lambda rollouts, config: divisors(rollouts, config) / len(set(rollouts.group_ids))


def new_optimizer(_) -> None:
    from dynamo_megatron.jobs import training_run

    training_run.load_checkpoint = partial(training_run.load_checkpoint, optimizer=False)


def late_learning_rate(policy) -> None:
    step, rates = policy.optimizer_step, []

    def late(optimizer, config, learning_rate):
        rates.append(learning_rate)
        step(optimizer, config, rates[max(0, len(rates) - 2)])

    policy.optimizer_step = late


def wrong_pairing(policy) -> None:
    build = policy.TrainBatch.build

    def shifted(*given):
        batch = build(*given)
        return dataclasses.replace(batch, advantages=np.roll(batch.advantages, 1))

    policy.TrainBatch.build = shifted


if __name__ == "__main__":
    run_cases(json.loads(Path(sys.argv[1]).read_text()))
