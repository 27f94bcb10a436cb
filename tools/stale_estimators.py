"""Which gradient rollouts of older weights estimate: Monte-Carlo on the policy of estimators.py.

    python -P tools/stale_estimators.py [--replicates N] [--write]

Prints the table `stale` of docs/estimators.md; --write puts it there. The policy has moved k steps uphill since it
sampled. Advantages, weights, importance ratios and loss are the trainer's own.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves this folder out

import estimators
from estimators import LENGTHS, LONGEST, SUCCESS_RATES, Figures, Policy, Problem

from dynamo_megatron.algorithm.aggregation import token_weights
from dynamo_megatron.algorithm.rollout_correction import correction_weights, importance_ratios
from dynamo_megatron.config import RolloutCorrectionConfig
from dynamo_megatron.config.method import PolicyLossConfig
from dynamo_megatron.evaluation.results import markdown_row

REPLICATES = 20_000  # of the page
STEP = 0.15  # length of a step uphill
STALENESS = (1, 2, 4)
COUNTS = np.full(len(SUCCESS_RATES), 16)


class Loss(NamedTuple):
    """`correction`: of the token weights. `clipped`: the ratio to the sampling policy, clipped; else its gradient at
    ratio 1 (the first update of a step). `newer`: tokens from this one on are of the newest weights."""

    correction: RolloutCorrectionConfig | None = None
    clipped: bool = False
    newer: int = LONGEST


TOKEN, SEQUENCE = RolloutCorrectionConfig(), RolloutCorrectionConfig(level="sequence")
LOSSES = {
    "as if on-policy": Loss(),
    "rollout_correction, token": Loss(TOKEN),
    "rollout_correction, sequence": Loss(SEQUENCE),
    "loss.old: engine, clip 0.2 / 0.2": Loss(clipped=True),
    "as if on-policy; newest weights from the third token on": Loss(newer=2),
    "rollout_correction, sequence; newest weights from the third token on": Loss(SEQUENCE, newer=2),
}


def policies() -> tuple[np.ndarray, dict[int, Policy]]:
    """(rewards, the policy after each number of steps)."""
    problem, theta, offsets = estimators.make_problem(), *_parameters()
    found = {0: Policy.at(theta, offsets)}
    for step in range(1, max(STALENESS) + 1):
        uphill = problem.gradient(found[step - 1]).reshape(theta.shape)
        theta = theta + STEP * uphill / np.linalg.norm(uphill)
        found[step] = Policy.at(theta, offsets)
    return problem.rewards, found


def _parameters() -> tuple[np.ndarray, np.ndarray]:
    """Those of `make_problem`."""
    shape = (LONGEST, estimators.TOKENS)
    theta, offsets = np.zeros(shape), np.random.default_rng(0).normal(0, 0.5, (len(SUCCESS_RATES), *shape))
    theta[:, estimators.END] = -0.7
    return theta, offsets


def sampler(old: Policy, new: Policy, newer: int) -> Policy:
    """Tokens before the one of index `newer` are of the old policy, the others of the new one."""
    logprobs = np.where(np.arange(LONGEST) < newer, old.logprobs, new.logprobs)
    return replace(new, logprobs=logprobs, probabilities=np.exp(logprobs.sum(-1)))


def gradients(problem: Problem, correction: RolloutCorrectionConfig | None, replicates: int) -> np.ndarray:
    """Of each mini-batch at `problem.moved`, whose rollouts are of `problem.policy`, float64 [replicates, d]."""
    parts, new = [], problem.moved
    for prompt, answer in estimators.draws(problem, COUNTS, replicates):
        live = np.arange(LONGEST) < LENGTHS[answer][..., None]
        weights = np.array([token_weights("prompt_mean", LENGTHS[a], prompt, max_length=LONGEST) for a in answer])
        weights *= estimators.advantages_of(problem, prompt, answer, "rloo")
        ratios = np.ones(live.shape)
        if correction is not None:  # past an answer's end both logprobs are 0
            apart = torch.from_numpy((new.logprobs - problem.policy.logprobs)[prompt, answer].ravel())
            lengths = torch.full((answer.size,), LONGEST)
            ratios = correction_weights(importance_ratios(apart, lengths, correction.level), correction)
            ratios = ratios.numpy().reshape(live.shape)
        pull = weights[..., None] * live * ratios
        parts.append(np.einsum("rst,rstv->rtv", pull, new.scores[prompt, answer]).reshape(len(answer), -1))
    return np.concatenate(parts)


def measure(replicates: int) -> dict[tuple[int, str], Figures]:
    """(steps, name) -> Figures, against the gradient at the newest weights."""
    rewards, moved = policies()
    found = {}
    for steps in STALENESS:
        for name, loss in LOSSES.items():
            new = moved[steps]
            problem = Problem(sampler(moved[0], new, loss.newer), new, rewards)
            if loss.clipped:
                estimates, _ = estimators.token_gradients(problem, COUNTS, replicates, new, PolicyLossConfig())
            else:
                estimates = gradients(problem, loss.correction, replicates)
            found[steps, name] = Figures.of(estimates, problem.gradient(new))
    return found


def tables(replicates: int) -> dict[str, str]:
    """The page's table in Markdown, by name."""
    rewards, moved = policies()
    fresh = Problem(moved[0], moved[0], rewards)
    unit = Figures.of(gradients(fresh, None, replicates), fresh.gradient(moved[0])).variance
    rows = [
        markdown_row(["steps", "loss", "bias, %", "along, %", "variance"]),
        markdown_row(["---:", "---"] + ["---:"] * 3),
    ]
    for (steps, name), figures in measure(replicates).items():
        estimate, low, high = figures.bias
        bias, along = f"{estimate:.1f} ({low:.1f} to {high:.1f})", f"{100 * LONGEST * figures.scale[0]:.0f}"
        rows.append(markdown_row([str(steps), name, bias, along, f"{figures.variance / unit:.2f}"]))
    return {"stale": "\n".join(rows)}


if __name__ == "__main__":
    estimators.write_tables(tables, __doc__, REPLICATES)
