"""Run by test_gpu_branch.py: what a GPU's ranks build and compute, on a CPU that calls itself one, with the stand-in
for TransformerEngine (te_stand_in.py) or without. Prints what it found as JSON."""

import json
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

import te_stand_in

JOB = json.loads(sys.argv[1])
if JOB["transformer_engine"]:
    te_stand_in.install()

from dynamo_megatron.policy import backend  # noqa: E402

backend.enable_cpu()

import torch  # noqa: E402
from layout_cases import rollouts  # noqa: E402

from dynamo_megatron.checkpoint.policy_state import begin_save, load_checkpoint  # noqa: E402
from dynamo_megatron.config import Config  # noqa: E402
from dynamo_megatron.models import load_model_config  # noqa: E402
from dynamo_megatron.policy.batch import TrainBatch  # noqa: E402
from dynamo_megatron.policy.layout import join_ranks  # noqa: E402
from dynamo_megatron.policy.policy import Policy  # noqa: E402
from dynamo_megatron.runtime.coordination import connect_store  # noqa: E402


def call_this_a_gpu(capability: list[int]) -> None:
    """After the process group, whose NCCL is not here."""
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda device=None: tuple(capability)
    torch.Tensor.pin_memory = lambda values: values
    empty = torch.empty
    torch.empty = lambda *size, pin_memory=False, **options: empty(*size, **options)


def update(policy: Policy) -> dict:
    """An update's figures; what the layers used in it, for each micro-batch and layer."""
    source = rollouts(policy.spec.vocab_size, 7, None)
    batch = TrainBatch.build(source, policy.config)
    (mini,) = policy.pack(source, batch.mini_batches)
    stats = policy.token_stats(source, [mini])
    te_stand_in.calls.clear()
    figures = policy.update(batch, mini, stats, None, 1e-3)
    passes = len(mini.micro_batches) * policy.spec.num_layers
    return {
        "logprobs": stats.logprobs.tolist(),
        "figures": figures,
        "weights": torch.cat([p.detach().double().flatten() for p in policy._parameters]).norm().item(),
        "calls": {name: count / passes for name, count in te_stand_in.calls.items()},
    }


def moments(policy: Policy) -> list[list[float]]:
    states = policy.optimizer.chained_optimizers[0].optimizer.state.values()
    return [[state[name].norm().item() for name in ("exp_avg", "exp_avg_sq")] for state in states]


def main() -> None:
    config = Config.model_validate(JOB["config"])
    spec, layout = load_model_config(config.model.path), join_ranks(config, connect_store(60))
    if JOB["gpu"]:
        call_this_a_gpu(JOB["capability"])
    found = {"packages": str(backend.Fusions.detect())}
    if JOB.get("update"):
        policy = Policy(spec, config, layout)
        attention = policy.chunks[0].decoder.layers[0].self_attention.core_attention
        found["attention"] = type(attention).__name__
        if folder := JOB.get("save_first"):
            begin_save(policy, Path(folder), 1, {}, background=False).complete(1, 60, print)
            straight = update(policy)
            resumed = Policy(spec, config, layout)
            load_checkpoint(resumed, Path(folder) / "step-000001")
            found["resumed"] = [straight, update(resumed), moments(policy), moments(resumed)]
        else:
            found |= update(policy)
    print(json.dumps(found))


main()
sys.stdout.flush()
os._exit(0)
