"""Run by test_offload.py: updates with and without a release of the training side's memory between them."""

import json
import sys
from pathlib import Path

from dynamo_megatron.policy import backend

backend.enable_cpu()

import numpy as np  # noqa: E402
import torch  # noqa: E402

from dynamo_megatron.config import Config  # noqa: E402
from dynamo_megatron.models import load_model_config  # noqa: E402
from dynamo_megatron.policy.batch import TrainBatch  # noqa: E402
from dynamo_megatron.policy.layout import join_ranks  # noqa: E402
from dynamo_megatron.policy.offload import PARTS, Offload  # noqa: E402
from dynamo_megatron.policy.policy import Policy  # noqa: E402
from dynamo_megatron.runtime.coordination import connect_store  # noqa: E402
from dynamo_megatron.types import Rollout, RolloutBatch  # noqa: E402


def batch(config: Config) -> TrainBatch:
    rng, rollouts = np.random.default_rng(0), []
    for i in range(6):
        tokens = rng.integers(5, 100, 20).tolist()
        made = (f"{i // 3}-{i}", f"g{i // 3}", f"p{i // 3}", 1, tokens, [0] * 8 + [1] * 12, [-4.0] * 12, [(0, 0, 12)])
        rollouts.append(Rollout(*made, "stop", float(i % 2), bool(i % 2), {}))
    return TrainBatch.build(RolloutBatch.from_rollouts(rollouts), config)


def values(policy: Policy) -> list[torch.Tensor]:
    return [p.detach().clone() for chunk in policy.chunks for p in chunk.parameters()]


def run(config: Config, layout, moved: bool) -> dict:
    policy = Policy(load_model_config(config.model.path), config, layout)
    offload, data, seen = Offload(policy), batch(config), {}
    for step in range(3):
        if moved and step:  # before the first update there is no optimizer state but the main weights
            freed = {part: offload.release([part]) for part in PARTS}
            seen = {"freed": freed, "again": offload.release(PARTS)}
            seen["resident"] = sum(p.untyped_storage().nbytes() for p in policy.chunks[0].parameters())
            seen["weights first"] = offload.resume(["weights"])
        mini_batches = policy.pack(data.rollouts, data.mini_batches)
        stats = policy.token_stats(data.rollouts, mini_batches)
        if moved and step:
            seen["taken"] = offload.resume(PARTS)
        policy.update(data, mini_batches[0], stats, None, 1e-3)
    return {"values": values(policy), **seen}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    layout, results = None, {}
    for name, model in job["models"].items():
        config = Config.model_validate(model)
        layout = layout or join_ranks(config, connect_store(60))
        straight, moved = run(config, layout, False), run(config, layout, True)
        equal = [torch.equal(a, b) for a, b in zip(straight.pop("values"), moved.pop("values"), strict=True)]
        parameters = sum(p.numel() for p in Policy(load_model_config(config.model.path), config, layout)._parameters)
        results[name] = {"equal": all(equal), "parameters": parameters, **moved}
    Path(job["out"]).write_text(json.dumps(results))


main()
