"""Run by every rank of test_layouts.py: the same rollouts through several layouts, results written for comparison."""

import dataclasses
import json
import os
import sys
from pathlib import Path

from dynamo_megatron.policy import backend

backend.enable_cpu()
backend.fix_torch_adam_checkpoints()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402

from dynamo_megatron.config import Config  # noqa: E402
from dynamo_megatron.coordination import connect_store  # noqa: E402
from dynamo_megatron.models import load_model_config  # noqa: E402
from dynamo_megatron.policy.batch import TrainBatch  # noqa: E402
from dynamo_megatron.policy.layout import join_ranks  # noqa: E402
from dynamo_megatron.policy.policy import NonFiniteError, Policy  # noqa: E402
from dynamo_megatron.records import RolloutBatch  # noqa: E402
from dynamo_megatron.resharding.push import write_huggingface  # noqa: E402


def rollouts(vocabulary: int, order_seed: int | None) -> RolloutBatch:
    """Groups of 2, 7 and 15 rollouts, one prompt twice, of any length; optionally in another order."""
    generator, engine = np.random.default_rng(7), np.random.default_rng(8)
    rows = []
    for group, (prompt, count) in enumerate([("a", 2), ("b", 7), ("c", 15), ("a", 5)]):
        length = int(generator.integers(3, 12))
        start = generator.integers(0, vocabulary, length)
        for k in range(count):
            response = generator.integers(0, vocabulary, int(generator.integers(1, 30)))
            logprobs = engine.normal(-np.log(vocabulary), 0.3, len(response)).astype(np.float32)
            rows.append(
                (f"{group}-{k}", f"g{group}", prompt, start, response, float(generator.random() < 0.5), logprobs)
            )
    order = np.arange(len(rows)) if order_seed is None else np.random.default_rng(order_seed).permutation(len(rows))
    rows = [rows[i] for i in order]
    ids, groups, prompts, starts, responses, rewards, logprobs = zip(*rows, strict=True)
    return RolloutBatch(
        rollout_ids=list(ids),
        group_ids=list(groups),
        prompt_ids=list(prompts),
        tokens=np.concatenate([np.concatenate(pair) for pair in zip(starts, responses, strict=True)]),
        offsets=np.concatenate([[0], np.cumsum([len(s) + len(r) for s, r in zip(starts, responses, strict=True)])]),
        prompt_lengths=np.asarray([len(s) for s in starts]),
        engine_logprobs=np.concatenate(logprobs),
        rewards=np.asarray(rewards),
        successes=np.asarray(rewards) > 0,
        weight_versions=np.zeros((len(rows), 2), np.int64),
    )


def main(cases_file: str) -> None:
    cases = json.loads(Path(cases_file).read_text())
    store = connect_store(60)
    for number, case in enumerate(cases):
        config = Config.model_validate(case["config"])
        spec = load_model_config(config.model.path)
        layout = join_ranks(config, dist.PrefixStore(f"case{number}", store))
        policy = Policy(spec, config, layout)
        source = rollouts(spec.vocab_size, case.get("order_seed"))
        batch = TrainBatch.build(source, config)
        if case.get("seeded_fault") == "micro_batch_mean":
            micro = policy._micro_batches(source, batch.mini_batches[0])
            weights = batch.weights.copy()
            for m in micro:
                weights[m.sequences] = 1 / len(micro) / max(1, len(m.slots))
            batch = dataclasses.replace(batch, weights=weights)
        out = Path(case["out"])
        if case.get("seeded_fault") in ("nan", "no_signal"):
            (out / "fault.json").write_text(json.dumps(run_fault(case["seeded_fault"], policy, batch)))
            leave()
            continue
        results = []
        for _ in range(2):
            stats = policy.token_stats(batch)
            reference = policy.reference_logprobs(batch)
            updates = [policy.update(batch, mini, stats, reference, 1e-3) for mini in batch.mini_batches]
            results.append((stats, updates))
        write_huggingface(policy, out / "hf")
        if layout.rank == 0:
            by_id = {}
            offsets = source.response_offsets
            for s, name in enumerate(source.rollout_ids):
                part = slice(offsets[s], offsets[s + 1])
                by_id[name] = [results[0][0].logprobs[part].tolist(), results[0][0].entropy[part].tolist()]
            (out / "result.json").write_text(json.dumps({"updates": [r[1] for r in results], "tokens": by_id}))
        leave()


def leave() -> None:
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def run_fault(fault: str, policy: Policy, batch: TrainBatch) -> dict:
    """What an update says to one rollout's NaN, or to advantages that are all 0; and whether a weight moved."""
    advantages = np.zeros_like(batch.advantages) if fault == "no_signal" else batch.advantages.copy()
    if fault == "nan":
        advantages[batch.rollouts.rollout_ids.index("1-3")] = np.nan
    stats = policy.token_stats(batch)
    before = [p.detach().clone() for p in policy.model.parameters()]
    said = ""
    try:
        mini = np.arange(len(advantages))
        said = policy.update(dataclasses.replace(batch, advantages=advantages), mini, stats, None, 1e-3)
    except NonFiniteError as error:
        said = str(error)
    after = policy.model.parameters()
    return {"said": said, "moved": any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))}


if __name__ == "__main__":
    main(sys.argv[1])
    os._exit(0)
