"""Run by test_gradient_variance.py: one rank, whose rollouts' gradients make up the gradient of an update."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from gradient_variance import Sketch, energies, gradients, open_policy, stored_rollouts

from dynamo_megatron.config import Config
from dynamo_megatron.config.files import to_plain
from dynamo_megatron.rollout.store import RolloutStore
from dynamo_megatron.types import Rollout

PROMPTS, ROLLOUTS, VOCABULARY = 3, 4, 101


def write_run(folder: Path, case: dict) -> None:
    config = Config.model_validate({**case, "output_dir": str(folder)})
    (folder / "config.yaml").write_text(yaml.safe_dump(to_plain(config)))
    store, rng = RolloutStore(folder), np.random.default_rng(0)
    for i in range(PROMPTS):
        prompt = rng.integers(5, VOCABULARY, 4).tolist()
        for j in range(ROLLOUTS):
            response = rng.integers(5, VOCABULARY, int(rng.integers(1, 6))).tolist()
            store.append(
                Rollout(
                    rollout_id=f"000001-{i:04}-{j:03}",
                    group_id=f"000001-{i:04}",
                    prompt_id=f"p{i}",
                    step=1,
                    tokens=prompt + response,
                    response_mask=[0] * len(prompt) + [1] * len(response),
                    engine_logprobs=[-4.0] * len(response),
                    weight_versions=[(0, 0, len(response))],
                    finish_reason="stop",
                    reward=float((i + j) % 2),
                    success=bool((i + j) % 2),
                    reward_parts={},
                )
            )
    store.close()


def main(file: Path) -> None:
    folder = file.parent
    write_run(folder, json.loads(file.read_text()))
    batch, policy = stored_rollouts(folder, None, ROLLOUTS), open_policy(folder)
    from dynamo_megatron.policy.batch import TrainBatch

    found = {"refused": ""}
    try:
        energies(policy, dataclasses.replace(batch, engine_logprobs=batch.engine_logprobs + 1))
    except ValueError as error:
        found["refused"] = str(error)
    parameters = [p for chunk in policy.chunks for p in chunk.parameters()]
    size = sum(p.numel() for p in parameters)
    own = np.concatenate(list(gradients(policy, batch, ROLLOUTS, Sketch(size, None))))
    sketch = Sketch(size, 997)
    sketched = np.concatenate(list(gradients(policy, batch, ROLLOUTS, sketch)))
    (mini,) = policy.pack(batch, [np.arange(len(own))])
    stats = policy.token_stats(batch, [mini])
    exact = dataclasses.replace(batch, engine_logprobs=stats.logprobs.numpy())
    found["energies"] = energies(policy, exact).tolist()
    step = TrainBatch.build(exact, policy.config)
    found["update"] = policy.update(step, mini, stats, None, 0.0)["grad_norm"]
    found["sum of rollouts"] = float(np.linalg.norm((step.weights * step.advantages) @ own))
    token = 1 - 2 * stats.logprobs.exp() + stats.collision
    found["energy of the first"] = float(token[: batch.response_lengths[0]].sum())
    found["squares"] = [np.square(x).sum(1).tolist() for x in (own, sketched)]
    found["errors"] = sketch.errors
    (folder / "found.json").write_text(json.dumps(found))


main(Path(sys.argv[1]))
