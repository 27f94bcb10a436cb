"""Runs as the trainer leaves them, made by the real allocator from success rates that are given."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import yaml
from background_run import made_rollout

from dynamo_megatron.algorithm.allocation import RolloutAllocator
from dynamo_megatron.config import Config
from dynamo_megatron.config.files import to_plain
from dynamo_megatron.rollout.store import RolloutStore
from dynamo_megatron.types import RolloutBatch


def write_run(folder: Path, *, steps: int = 12, allocation: dict | None = None) -> Config:
    """Batches of 8 from 18 prompts, round after round: some steps hold a prompt twice. One rollout in 20 failed.

    Rollouts come to the disk in any order and are observed as the trainer does.
    """
    config = Config(
        model={"path": "none"},
        data={"source": "none", "batch_prompts": 8},
        algorithm={"allocation": allocation or {}},
        output_dir=str(folder),
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(to_plain(config)))
    generator, store = np.random.default_rng(0), RolloutStore(folder)
    allocator = RolloutAllocator(config.algorithm.allocation)
    chance = generator.beta(0.5, 0.5, 18)
    order = [i for _ in range(steps) for i in generator.permutation(18)]
    for step in range(1, steps + 1):
        drawn = order[8 * (step - 1) : 8 * step]
        ids = [f"problem/{i}" for i in drawn]
        counts = allocator.allocate(ids, config.rollout_budget, step=step)
        rollouts = []
        for position, n in enumerate(counts):
            for index in range(n):
                failed, right = generator.random() < 0.05, bool(generator.random() < chance[drawn[position]])
                fields = {"reward": 1.0 if right else 0.25 * (index % 2), "finish_reason": "stop"}  # partial credit
                if failed:
                    fields = {"reward": 0.0, "status": "failed", "weight_versions": [], "finish_reason": "error"}
                response = [] if failed else [2] * (1 + index % 3)
                fields |= {"right": right and not failed, "engine_logprobs": [-1.0] * len(response)}
                rollouts.append(made_rollout(step, position, index, ids[position], [1], response, **fields))
        for i in generator.permutation(len(rollouts)):
            store.append(rollouts[i])
        seen = RolloutBatch.from_rollouts([r for r in rollouts if r.status != "failed"])
        allocator.observe(seen.prompt_ids, seen.rewards, seen.successes, step)
        with (folder / "allocation.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in allocator.last.rows())
    store.close()
    return config
