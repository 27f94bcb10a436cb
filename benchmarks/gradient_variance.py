"""The variance of the mini-batch's gradient, of all parameters, under every shape, baseline and allocator.

    dynamo-megatron train CONFIG... optimizer.lr=0 trainer.steps=1 data.batch_prompts=96 \
        algorithm.allocation.kind=uniform algorithm.allocation.budget=3072 \
        algorithm.allocation.rollout_n_max=32 eval.every=null output_dir=RUN
    python -P benchmarks/gradient_variance.py RUN --label NAME

RUN is a training run; the rollouts of its first step are from the weights of its `model.path`. The trainer's own policy
(Megatron, one rank, float32) gives the gradient of each rollout's log-probability. Reported, in
benchmarks/results/gradient_variance.json under `--label` (other labels stay): the variance of every design relative to
rloo with uniform counts at 8 prompts x 8 rollouts, with 95 % intervals of a bootstrap over prompts
(gradient_designs.py says how); and how the energy S = sum_t (1 - 2 pi_t + sum_v pi_v^2) of a rollout goes with the
squared norm of its gradient. With `--sketch D` gradients are kept as D numbers: every parameter's derivative goes, with
a random sign, to one of them. Inner products stay unbiased; the error of the squared norms is reported.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dynamo_megatron.algorithm.energy import rollout_energies
from dynamo_megatron.config import Config
from dynamo_megatron.config.files import read_yaml
from dynamo_megatron.evaluation.results import markdown_row
from dynamo_megatron.models import load_model_config
from dynamo_megatron.policy import backend
from dynamo_megatron.replay.recording import GRADIENTS_FILE
from dynamo_megatron.rollout.store import read_rollouts, step_file
from dynamo_megatron.types import NOT_TRAINED, RolloutBatch

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves this folder out
from gradient_designs import Pool, compare, prompt_parts, signal_share
from measure import machine

RESULTS = Path(__file__).parent / "results" / "gradient_variance.json"
PACKAGES = ("dynamo-megatron", "torch", "megatron-core", "sglang", "transformers")
SHAPES = ((8, 8), (16, 4), (32, 2), (64, 1))  # prompts x rollouts; the first is what the others are compared with
SAME_WEIGHTS = 0.05  # nats, mean difference of the server's logprobs from the policy's
BINS = 4  # of response lengths


def stored_rollouts(run: Path, prompts: int | None, rollouts: int, mixed: bool = False) -> RolloutBatch:
    """Of the run's first step, the first `rollouts` of each prompt that has as many; `mixed`: and whose rewards are not
    all the same. At most `prompts` of these, in the order of their ids. Raises ValueError for one prompt or none."""
    groups: dict[str, list] = {}
    for rollout in read_rollouts(step_file(run, 1)):
        if rollout.status not in NOT_TRAINED:
            groups.setdefault(rollout.prompt_id, []).append(rollout)
    # By their names: the file has them as they finished, the shortest first.
    ordered = (sorted(group, key=lambda rollout: rollout.rollout_id) for _, group in sorted(groups.items()))
    full = [group[:rollouts] for group in ordered if len(group) >= rollouts]
    if mixed:
        full = [group for group in full if len({r.reward for r in group}) > 1]
    if len(full[:prompts]) < 2:
        what = f"{rollouts} rollouts{' of different rewards' if mixed else ''} in step 1"
        raise ValueError(f"{run}: {len(full)} prompts with {what}; sample more, or ask for fewer")
    return RolloutBatch.from_rollouts([r for group in full[:prompts] for r in group])


def open_policy(run: Path) -> Any:
    """The run's policy at its start, on this process alone, in float32."""
    plain = read_yaml(run / "config.yaml", "config.yaml")
    plain["parallel"] = {}
    plain["model"]["dtype"] = "float32"
    config = Config.model_validate(plain)
    backend.enable_cpu()
    backend.define_router_gemm()
    backend.fix_torch_adam_checkpoints()
    # Megatron may only be imported once the backend is set up.
    from dynamo_megatron.policy.layout import join_ranks
    from dynamo_megatron.policy.policy import Policy

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    layout = join_ranks(config, dist.HashStore())
    return Policy(load_model_config(config.model.path, config.model.family), config, layout)


def energies(policy: Any, batch: RolloutBatch) -> np.ndarray:
    """float64 [S]. Raises ValueError where the rollouts are from other weights."""
    mini_batches = policy.pack(batch, [np.arange(len(batch.prompt_ids))])
    stats = policy.token_stats(batch, mini_batches)
    logprobs, collision = stats.logprobs.numpy(), stats.collision.numpy()
    gap = float(np.abs(logprobs - batch.engine_logprobs).mean())
    if gap > SAME_WEIGHTS:
        raise ValueError(f"the logprobs of the rollouts differ by {gap:.2g} nats: they are not from these weights")
    return rollout_energies(logprobs, collision, batch.response_lengths)


class Sketch:
    """Gradients as `size` numbers; None: as they are."""

    def __init__(self, parameters: int, size: int | None):
        self.size, self.errors = size or parameters, []
        generator = torch.Generator().manual_seed(0)
        self._signs = (
            torch.randint(0, 2, (parameters,), dtype=torch.int8, generator=generator) * 2 - 1 if size else None
        )

    def __call__(self, gradients: list[torch.Tensor]) -> np.ndarray:
        """float32 [size]. The place of a derivative in its tensor, modulo `size`, says which of the numbers it is
        added to."""
        if self._signs is None:
            return torch.cat([g.flatten() for g in gradients]).numpy()
        found, start, squares = torch.zeros(self.size), 0, 0.0
        for gradient in gradients:
            flat = gradient.flatten()
            squares += float(flat.dot(flat))
            signed = flat * self._signs[start : start + len(flat)]
            whole = len(flat) // self.size * self.size
            found += signed[:whole].view(-1, self.size).sum(0)
            found[: len(flat) - whole] += signed[whole:]
            start += len(flat)
        self.errors.append(float(found.dot(found)) / squares - 1 if squares else 0.0)
        return found.numpy()


def gradients(policy: Any, batch: RolloutBatch, rollouts: int, sketch: Sketch) -> Iterator[np.ndarray]:
    """Of each prompt, float32 [rollouts, size]."""
    prompts = len(batch.prompt_ids) // rollouts
    for i in range(prompts):
        own = np.empty((rollouts, sketch.size), np.float32)
        for j in range(rollouts):
            (mini_batch,) = policy.pack(batch, [np.array([i * rollouts + j])])
            own[j] = sketch(policy.score(batch, mini_batch))
        print(f"\rgradients: prompt {i + 1}/{prompts}", end="", file=sys.stderr, flush=True)
        yield own
    print(file=sys.stderr)


def energy_report(pool: Pool, lengths: np.ndarray) -> dict[str, Any]:
    """How S goes with the squared norm of the gradient; wrong over right of both, by response length (tokens)."""
    rewards, energy = pool.rewards.ravel(), pool.energy.ravel()
    norms = np.einsum("ijj->ij", pool.products).ravel()
    logs = np.log(np.maximum([energy, norms], 1e-12))
    edges = np.unique(np.quantile(lengths, np.arange(1, BINS) / BINS, method="nearest"))
    part = np.searchsorted(edges, lengths, side="right")
    rows = []
    for name in ("all", *np.unique(part)):
        chosen = part == name if name != "all" else np.ones(len(part), bool)
        right, wrong = chosen & (rewards == 1), chosen & (rewards == 0)
        ratios = [
            float(x[wrong].mean() / x[right].mean()) if right.any() and wrong.any() else None for x in (energy, norms)
        ]
        span = [int(lengths[chosen].min()), int(lengths[chosen].max())]
        counts = {"tokens": span, "right": int(right.sum()), "wrong": int(wrong.sum())}
        rows.append({**counts, "S0/S1": ratios[0], "|g|^2 of wrong over right": ratios[1]})
    return {"log-correlation": float(np.corrcoef(logs)[0, 1]), "wrong over right": rows}


def store_variances(run: Path, prompt_ids: Sequence[str], variances: np.ndarray) -> None:
    """Writes RUN/gradients.jsonl, which `replay` reads: a prompt's s^2, its gradient's variance times rollouts."""
    rows = ({"prompt_id": i, "variance": float(v)} for i, v in zip(prompt_ids, variances, strict=True))
    (run / GRADIENTS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    batch = stored_rollouts(options.run, options.prompts, options.rollouts, options.mixed)
    policy = open_policy(options.run)
    parameters = sum(p.numel() for chunk in policy.chunks for p in chunk.parameters())
    sketch, shape = Sketch(parameters, options.sketch), (-1, options.rollouts)
    energy = energies(policy, batch).reshape(shape)
    pool = Pool.of(gradients(policy, batch, options.rollouts, sketch), batch.rewards.reshape(shape), energy)
    rng = np.random.default_rng(0)
    orders = np.argsort(rng.random((options.orders, *pool.rewards.shape)), axis=2)
    parts = prompt_parts(pool, orders, SHAPES[0][1])
    store_variances(options.run, batch.prompt_ids[:: options.rollouts], parts[1])
    return {
        "model": policy.config.model.path,
        "parameters": parameters,
        "sketch": options.sketch,
        "sketch error": float(np.sqrt(np.mean(np.square(sketch.errors)))) if options.sketch else None,
        "prompts": len(pool.rewards),
        "mixed": options.mixed,
        "rollouts of each": options.rollouts,
        "history": options.history,
        "orders": options.orders,
        "success rate": float(pool.rewards.mean()),
        "response length": float(batch.response_lengths.mean()),
        **signal_share(pool, parts, SHAPES[0][1]),
        "energy": energy_report(pool, batch.response_lengths),
        "designs": compare(pool, SHAPES, history=options.history, orders=orders),
    }


def markdown(designs: list[dict[str, Any]]) -> str:
    lines = [
        markdown_row(["shape", "baseline", "allocator", "variance", "95 %"]),
        markdown_row(["---"] * 3 + ["---:"] * 2),
    ]
    for row in designs:
        low, high = row["interval"]
        figures = [f"{row['variance']:.2f}", f"{low:.2f} to {high:.2f}"]
        lines.append(markdown_row([row["shape"], row["baseline"], row["allocator"], *figures]))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run's output folder")
    parser.add_argument("--label", required=True)
    parser.add_argument("--prompts", type=int, help="at most; default: all that have the rollouts")
    parser.add_argument("--mixed", action="store_true", help="only prompts whose rollouts have different rewards")
    parser.add_argument("--rollouts", type=int, default=32, help="of each prompt")
    parser.add_argument("--history", type=int, default=8, help="of these, seen before the step")
    parser.add_argument("--orders", type=int, default=64, help="random orders of each prompt's rollouts")
    parser.add_argument("--sketch", type=int, metavar="D", help="keep D numbers of each gradient; default: all of it")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    described = machine(PACKAGES)
    found = measure(options)
    record = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    record[options.label] = {"machine": described, "command": sys.argv[1:], **found}
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(markdown(found["designs"]))


if __name__ == "__main__":
    main()
