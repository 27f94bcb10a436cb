"""Runs as the trainer leaves them, made by the real allocator from success rates that are given."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import yaml

from dynamo_megatron.algorithm.allocation import RolloutAllocator
from dynamo_megatron.config import Config
from dynamo_megatron.config.files import to_plain
from dynamo_megatron.rollout.result import group_id, rollout_id
from dynamo_megatron.rollout.store import RolloutStore
from dynamo_megatron.types import Rollout, RolloutBatch


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
                rollouts.append(_rollout(step, ids[position], position, index, right, failed))
        for i in generator.permutation(len(rollouts)):
            store.append(rollouts[i])
        seen = RolloutBatch.from_rollouts([r for r in rollouts if r.status != "failed"])
        allocator.observe(seen.prompt_ids, seen.rewards, seen.successes, step)
        with (folder / "allocation.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in allocator.last.rows())
    store.close()
    return config


def _rollout(step: int, prompt_id: str, position: int, index: int, right: bool, failed: bool) -> Rollout:
    group = group_id(step, position)
    return Rollout(
        rollout_id=rollout_id(group, index),
        group_id=group,
        prompt_id=prompt_id,
        step=step,
        tokens=[1] if failed else [1, 2],
        response_mask=[0] if failed else [0, 1],
        engine_logprobs=[] if failed else [-1.0],
        weight_versions=[] if failed else [(step - 1, 0, 1)],
        finish_reason="error" if failed else "stop",
        # Partial credit: rewards differ within a group whose successes do not.
        reward=0.0 if failed else 1.0 if right else 0.25 * (index % 2),
        success=right and not failed,
        reward_parts={},
        status="failed" if failed else "ok",
    )
