"""What it costs to measure the gradient's noise while training, and how noisy a measurement is.

    python -P benchmarks/gradient_noise.py RUN --label NAME

RUN is as for gradient_variance.py, whose policy and stored rollouts are taken: mini-batches are drawn from them and
updated on with learning rate 0, measured and not, in turns, on one rank. Reported in
benchmarks/results/gradient_noise.json under `--label` (other labels stay): seconds of an update of both kinds; the mean
of each measured number with its standard error, and the standard deviation of one measurement; and two ratios as
measured and as gradient_variance.py has them under the same label, from the gradients of all stored rollouts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from dynamo_megatron.algorithm.gradient_noise import Noise
from dynamo_megatron.config import Config
from dynamo_megatron.config.files import to_plain
from dynamo_megatron.policy.batch import TrainBatch

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves this folder out
from gradient_variance import PACKAGES, open_policy, stored_rollouts
from gradient_variance import RESULTS as WHOLE
from measure import machine, seconds_once, summary

RESULTS = WHOLE.with_name("gradient_noise.json")
RATIOS = ("|g|^2/s^2", "between prompts")


def with_rloo(config: Config) -> Config:
    """No history is needed then, and no modulation ties a rollout to its mini-batch."""
    plain = to_plain(config)
    plain["algorithm"] |= {"advantage": {"kind": "rloo"}, "modulation": None}
    return Config.model_validate(plain)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    stored = stored_rollouts(options.run, None, options.stored)
    policy = open_policy(options.run)
    config, rng = with_rloo(policy.config), np.random.default_rng(0)
    prompts = len(stored.prompt_ids) // options.stored
    seconds: dict[bool, list[float]] = {False: [], True: []}
    found = []
    for number in range(options.updates + 1):
        chosen = rng.choice(prompts, min(options.prompts, prompts), replace=False)
        rows = [i * options.stored + rng.permutation(options.stored)[: options.rollouts] for i in chosen]
        batch = TrainBatch.build(stored.take(np.sort(np.concatenate(rows))), config)
        everyone = np.arange(len(batch.advantages))
        for measured in (False, True):
            (mini,) = policy.pack(batch.rollouts, [everyone], measured)
            stats = policy.token_stats(batch.rollouts, [mini])
            results: list[dict[str, float]] = []
            taken = seconds_once(
                lambda b=batch, m=mini, s=stats, r=results: r.append(policy.update(b, m, s, None, 0.0)),
                policy.layout.device,
            )
            if number:  # the first one warms up
                seconds[measured].append(taken)
            if number and (noise := Noise.of(results[0])) is not None:
                found.append(dataclasses.astuple(noise))
        print(f"\rupdate {number}/{options.updates}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    values = np.array(found)
    signal, between, within = values.mean(0)
    names, deviations = [field.name for field in dataclasses.fields(Noise)], values.std(0, ddof=1)
    return {
        "model": policy.config.model.path,
        "prompts x rollouts": [len(chosen), options.rollouts],
        "micro-batch tokens": policy.config.trainer.micro_batch_tokens,
        "seconds of an update": {"measured" if k else "plain": summary(taken) for k, taken in seconds.items()},
        "measured": {
            name: {"mean": mean, "standard error": deviation / np.sqrt(len(values)), "of one": deviation}
            for name, mean, deviation in zip(names, values.mean(0).tolist(), deviations.tolist(), strict=True)
        },
        RATIOS[0]: float((signal + between) / within),
        RATIOS[1]: float(between / (between + within / options.rollouts)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run's output folder")
    parser.add_argument("--label", required=True)
    parser.add_argument("--prompts", type=int, default=8, help="of a mini-batch")
    parser.add_argument("--rollouts", type=int, default=8, help="of a prompt")
    parser.add_argument("--stored", type=int, default=32, help="rollouts of each prompt that are drawn from")
    parser.add_argument("--updates", type=int, default=400, help="of each kind")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    described = machine(PACKAGES)
    found = measure(options)
    whole = json.loads(WHOLE.read_text(encoding="utf-8")).get(options.label) if WHOLE.exists() else None
    found["from all gradients"] = whole and {name: whole[name] for name in RATIOS}
    record = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    record[options.label] = {"machine": described, "command": sys.argv[1:], **found}
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
