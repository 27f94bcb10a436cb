"""How well a prompt's variance is estimated from the energies of few rollouts, by several shrinkages.

    python -P benchmarks/energy_variance.py [--out benchmarks/results]

Writes energy_variance.json and .md, and prints the table. Simulated pools of prompts, of each 8 or 24 rollouts; what is
estimated is s^2 = E[(r - p)^2 S], S a rollout's energy (docs/allocation.md), which is known exactly. "Variance" is
sum s^2 / n of the counts that `neyman` gives by the estimate, over uniform's; "correlation" is that of log s^2.

- means: p (1-p)^2 m1 + p^2 (1-p) m0 with the prompt's mean energies m1 and m0, the pool's where it has none;
- means, 8: the same, shrunk to the pool's by 8 rollouts;
- factor, 8: the pool's m1 and m0 times the prompt's energy over what they expect, shrunk to 1 by 8 rollouts;
- energy: `variance: energy`, lines in p and one factor whose shrinkage is fitted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves this folder out
from measure import machine

from dynamo_megatron.algorithm.allocation import neyman
from dynamo_megatron.algorithm.history import History, Observed, Statistics
from dynamo_megatron.algorithm.success import beta_prior, expected_variance
from dynamo_megatron.evaluation.results import markdown_row

PROMPTS, MEAN, BOUNDS, FLOOR = 300, 8, (2, 24), 0.2
SEEN, SEEDS = (8, 24), 5


class Pool(NamedTuple):
    p: np.ndarray  # [N]
    right: np.ndarray  # mean energy of right rollouts [N]
    wrong: np.ndarray
    sample: Callable[[int], tuple[np.ndarray, np.ndarray]]  # rollouts of each -> (right, energy) [N, rollouts]


def policies(rng: np.random.Generator, logits: np.ndarray, scale: np.ndarray) -> Pool:
    """Softmax policies, logits [N, tokens, vocabulary]; right if every token is 0. `scale` [N] multiplies energies."""
    pi = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    energy = (1 - 2 * pi + (pi**2).sum(-1, keepdims=True)) * scale[:, None, None]
    p = pi[:, :, 0].prod(1)
    right = energy[:, :, 0].sum(1)
    wrong = ((pi * energy).sum((1, 2)) - p * right) / (1 - p)

    def sample(rollouts: int) -> tuple[np.ndarray, np.ndarray]:
        drawn = rng.uniform(size=(len(p), rollouts, pi.shape[1], 1)) > pi.cumsum(-1)[:, None]
        token = np.minimum(drawn.sum(-1), pi.shape[2] - 1)
        sampled = np.take_along_axis(energy[:, None], token[..., None], -1)[..., 0]
        return (token == 0).all(-1), sampled.sum(-1)

    return Pool(p, right, wrong, sample)


def responses(rng: np.random.Generator, by_difficulty: float) -> Pool:
    """Lengths that differ from prompt to prompt; wrong responses longer; `by_difficulty`: hard prompts' longer."""
    p = rng.beta(0.4, 0.8, PROMPTS)
    right = rng.lognormal(6, 0.7, PROMPTS) * np.exp(by_difficulty * (0.5 - p))
    wrong = right * np.exp(rng.normal(0.6, 0.3, PROMPTS))

    def sample(rollouts: int) -> tuple[np.ndarray, np.ndarray]:
        success = rng.uniform(size=(PROMPTS, rollouts)) < p[:, None]
        mean = np.where(success, right[:, None], wrong[:, None])
        return success, mean * rng.gamma(3, 1 / 3, mean.shape)

    return Pool(p, right, wrong, sample)


def pools(rng: np.random.Generator) -> dict[str, Pool]:
    def logits(tokens: int, words: int, mean: float, spread: float) -> np.ndarray:
        found = rng.normal(size=(PROMPTS, tokens, words))
        found[:, :, 0] += rng.normal(mean, spread, (PROMPTS, 1))
        return found

    one = np.ones(PROMPTS)
    return {
        "one token of 16": policies(rng, logits(1, 16, 1.5, 2.5), one),
        "one token of 4, sure": policies(rng, logits(1, 4, 0, 4.0), one),
        "7 tokens of 8": policies(rng, logits(7, 8, 4.5, 1.5), one),
        "7 tokens of 8, hard": policies(rng, logits(7, 8, 3.4, 1.2), one),
        "one token, scaled": policies(rng, logits(1, 16, 1.5, 2.5), rng.lognormal(0, 0.7, PROMPTS)),
        "lengths": responses(rng, 0.0),
        "lengths, hard ones long": responses(rng, 1.0),
    }


def estimates(seen: Statistics) -> dict[str, np.ndarray]:
    a, b = beta_prior(seen.successes, seen.trials)
    a, b = a + seen.successes, b + seen.trials - seen.successes
    s = a + b
    right, wrong = (x / (s * (s + 1) * (s + 2)) for x in (a * b * (b + 1), a * b * (a + 1)))
    n1, n0, e1, e0 = seen.energy_right_trials, seen.energy_wrong_trials, seen.energy_right, seen.energy_wrong
    m1, m0 = e1.sum() / n1.sum(), e0.sum() / n0.sum()

    def mean(total: np.ndarray, trials: np.ndarray, pool: float, strength: float) -> np.ndarray:
        return (total + strength * pool) / (trials + strength)

    factor = mean((e1 + e0) / (n1 * m1 + n0 * m0) * seen.trials, seen.trials, 1.0, 8.0)
    return {
        **{model: expected_variance(model, seen, seen) for model in ("bernoulli", "surprise")},
        "means": right * mean(e1, n1, m1, 1e-9) + wrong * mean(e0, n0, m0, 1e-9),
        "means, 8": right * mean(e1, n1, m1, 8.0) + wrong * mean(e0, n0, m0, 8.0),
        "factor, 8": (right * m1 + wrong * m0) * factor,
        "energy": expected_variance("energy", seen, seen),
    }


def measure() -> dict[str, dict[str, dict[str, list[float]]]]:
    """pool -> "estimate (rollouts seen)" -> means over SEEDS: variance, with the default floor, and correlation."""
    found: dict[str, dict[str, list[list[float]]]] = {}
    for seed in range(SEEDS):
        for name, pool in pools(np.random.default_rng(seed)).items():
            p, q = pool.p, 1 - pool.p
            variance = p * q**2 * pool.right + p**2 * q * pool.wrong
            mixed = (p > 0.002) & (p < 0.998)
            for rollouts in SEEN:
                success, energy = pool.sample(rollouts)
                history, ids = History(), [f"p{i}" for i in range(PROMPTS)]
                who = [i for i in ids for _ in range(rollouts)]
                flat = success.ravel()
                history.observe(Observed.of(who, flat.astype(float), flat, 1, energy.ravel()), 1.0)
                for model, estimate in {
                    **estimates(history.of(ids)),
                    "true s^2": variance,
                    "true p(1-p)": p * q,
                }.items():
                    row = [_ratio(variance, estimate), _ratio(variance, estimate + FLOOR * estimate.mean())]
                    row.append(float(np.corrcoef(np.log(estimate[mixed]), np.log(variance[mixed]))[0, 1]))
                    found.setdefault(name, {}).setdefault(f"{model} ({rollouts} seen)", []).append(row)
    keys = ("variance", "with floor", "correlation")
    return {
        pool: {model: dict(zip(keys, np.mean(rows, axis=0).tolist(), strict=True)) for model, rows in of.items()}
        for pool, of in found.items()
    }


def _ratio(variance: np.ndarray, estimate: np.ndarray) -> float:
    return float((variance / neyman(estimate, MEAN * PROMPTS, *BOUNDS)).sum() / (variance / MEAN).sum())


def markdown(result: dict) -> str:
    found = result["pools"]
    lines = [
        "# The variance of a prompt from the energies of its rollouts",
        "",
        f"{PROMPTS} prompts, {MEAN} rollouts each on average in {BOUNDS[0]}..{BOUNDS[1]}; variance to uniform, / with "
        f"a floor of {FLOOR:g} / log-correlation; means of {SEEDS} draws.",
        "",
        markdown_row(["estimate", *found]),
        markdown_row(["---"] + ["---:"] * len(found)),
    ]
    for model in next(iter(found.values())):
        cells = (of[model] for of in found.values())
        lines.append(
            markdown_row(
                [model, *(f"{c['variance']:.3f} / {c['with floor']:.3f} / {c['correlation']:.2f}" for c in cells)]
            )
        )
    where = ", ".join(f"{key} {value}" for key, value in result["machine"].items())
    return "\n".join([*lines, "", f"Made on: {where}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", metavar="FOLDER")
    options = parser.parse_args()
    result = {"machine": machine(["numpy"]), "pools": measure()}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "energy_variance.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (options.out / "energy_variance.md").write_text(markdown(result) + "\n", encoding="utf-8")
    print(markdown(result))


if __name__ == "__main__":
    main()
