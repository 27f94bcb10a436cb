"""Which gradient `advantage.kind: history` estimates: Monte-Carlo on the policy of estimators.py, with its figures.

    python -P tools/history_estimators.py [--replicates N] [--write]

Prints a table of docs/estimators.md; --write puts it there. Every mini-batch has a history of its own, of rollouts
sampled before; baselines, advantages, weights and counts are the trainer's own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves this folder out

import estimators
from estimators import ANSWERS, LENGTHS, LONGEST, SUCCESS_RATES, Figures, Policy, Problem

from dynamo_megatron.algorithm.advantages import group_advantages, history_advantages
from dynamo_megatron.algorithm.aggregation import token_weights
from dynamo_megatron.algorithm.allocation import RolloutAllocator, neyman
from dynamo_megatron.algorithm.energy import rollout_energies
from dynamo_megatron.evaluation.results import markdown_row

REPLICATES = 20_000  # of the page
PROMPTS = len(SUCCESS_RATES)
IDS = [f"p{i}" for i in range(PROMPTS)]
VISITS = np.arange(PROMPTS) % 5  # earlier steps with 4 rollouts of the prompt
VISIT = 4


class Design(NamedTuple):
    counts: np.ndarray  # int64 [P]
    baseline: str = "history"  # or rloo
    score_ratio: float | None = 1.0  # None: measured
    prior_strength: float = 1.0
    later: bool = False  # the update of a policy that has moved since the rollouts were sampled, without clips
    fault: str = ""  # "updated first": the statistics take in the rollouts before the baselines are made;
    # "own reward": the mean of the whole group in place of that of the others


def same(n: int) -> np.ndarray:
    return np.full(PROMPTS, n)


RATES = np.array(SUCCESS_RATES)
UNEQUAL = neyman(RATES * (1 - RATES), 4 * PROMPTS, 1, 12)
DESIGNS = {
    "rloo, 8 each": Design(same(8), "rloo"),
    "rloo, 2 each": Design(same(2), "rloo"),
    "history, 8 each": Design(same(8)),
    "history, 2 each": Design(same(2)),
    "history, 1 each": Design(same(1)),
    "history, 1 to 12 by neyman": Design(UNEQUAL),
    "history, 2 each, prior of 4 rollouts": Design(same(2), prior_strength=4.0),
    "optimal baseline, 2 each": Design(same(2), score_ratio=None),
    "optimal baseline, 1 to 12 by neyman, ratio 3": Design(UNEQUAL, score_ratio=3.0),
    "rloo, 8 each, a later update": Design(same(8), "rloo", later=True),
    "history, 2 each, a later update": Design(same(2), later=True),
    "fault: statistics updated first, 1 each": Design(same(1), fault="updated first"),
    "fault: own reward in the baseline, 1 each": Design(same(1), fault="own reward"),
}


def energies_of(problem: Problem) -> np.ndarray:
    """float64 [P, A]: of every answer."""
    policy, rows = problem.policy, []
    tokens = np.arange(LONGEST) < LENGTHS[:, None]
    for logprobs, collision in zip(policy.logprobs, policy.collision, strict=True):
        rows.append(rollout_energies(logprobs[tokens], collision[tokens], LENGTHS))
    return np.array(rows)


def gradients(problem: Problem, design: Design, replicates: int, seed: int = 1) -> np.ndarray:
    """Of each mini-batch, under `prompt_mean`, float64 [replicates, d]."""
    rng, energies = np.random.default_rng(seed), energies_of(problem)
    cumulative = problem.policy.probabilities.cumsum(1)
    prompt = np.repeat(np.arange(PROMPTS), design.counts)
    groups = prompt.tolist()
    scores = pulls(problem, problem.moved if design.later else problem.policy)

    def draw(prompts: np.ndarray) -> np.ndarray:
        places = rng.uniform(size=len(prompts)) * cumulative[prompts, -1]
        return (cumulative[prompts] < places[:, None]).sum(1)

    def observe(allocator: RolloutAllocator, prompts: np.ndarray, answers: np.ndarray, step: int) -> None:
        rewards = problem.rewards[prompts, answers]
        allocator.observe([IDS[i] for i in prompts], rewards, rewards == 1, step, energies[prompts, answers])

    found = []
    for _ in range(replicates):
        allocator = RolloutAllocator({"kind": "uniform"})
        for step in range(VISITS.max()):
            earlier = np.repeat(np.flatnonzero(step < VISITS), VISIT)
            observe(allocator, earlier, draw(earlier), step)
        answers = draw(prompt)
        rewards = problem.rewards[prompt, answers]
        if design.fault == "updated first":
            observe(allocator, prompt, answers, VISITS.max())
        if design.baseline == "rloo":
            advantages = group_advantages(rewards, groups, "rloo")
        else:
            known = allocator.reward_baseline(IDS, design.prior_strength, design.score_ratio).of(prompt)
            advantages = history_advantages(rewards, groups, known.mean, known.strength, known.score_ratio)
            if design.fault == "own reward":  # r - (m c + sum of all) / (c + n) is this much of it
                n = design.counts[prompt]
                advantages = advantages * (known.strength + n - 1) / (known.strength + n)
        weights = token_weights("prompt_mean", LENGTHS[answers], groups, max_length=LONGEST)
        found.append((weights * advantages) @ scores[prompt, answers])
    return np.array(found)


def pulls(problem: Problem, policy: Policy) -> np.ndarray:
    """float64 [P, A, d]: the gradient of the sum of an answer's token ratios at `policy`."""
    ratio = np.exp(policy.logprobs - problem.policy.logprobs)[..., None]
    return (ratio * policy.scores).reshape(PROMPTS, len(ANSWERS), -1)


def measure(replicates: int, names: Iterable[str] = DESIGNS) -> dict[str, Figures]:
    problem = estimators.make_problem()
    return {
        name: Figures.of(
            gradients(problem, DESIGNS[name], replicates),
            problem.gradient(problem.moved if DESIGNS[name].later else problem.policy),
        )
        for name in names
    }


def table(measured: dict[str, Figures]) -> str:
    def for_a_rollout(name: str) -> float:
        return measured[name].variance * DESIGNS[name].counts.mean()

    rows = [markdown_row(["advantage", "bias, %", "variance"]), markdown_row(["---", "---:", "---:"])]
    for name, figures in measured.items():
        estimate, low, high = figures.bias
        variance = for_a_rollout(name) / for_a_rollout("rloo, 8 each")
        rows.append(markdown_row([name, f"{estimate:.1f} ({low:.1f} to {high:.1f})", f"{variance:.2f}"]))
    return "\n".join(rows)


if __name__ == "__main__":
    estimators.write_tables(lambda replicates: {"history": table(measure(replicates))}, __doc__, REPLICATES)
