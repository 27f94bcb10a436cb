"""Which gradient rounds estimate that look at the step's own outcomes: Monte-Carlo on the policy of estimators.py.

    python -P tools/sequential_estimators.py [--replicates N] [--write]

Prints the table `sequential` of docs/estimators.md; --write puts it there. Every mini-batch has the 12 prompts. Rules,
baselines, advantages and weights are the trainer's own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves this folder out

import estimators
from estimators import LENGTHS, LONGEST, SUCCESS_RATES, Figures, Problem

from dynamo_megatron.algorithm.advantages import group_advantages, history_advantages
from dynamo_megatron.algorithm.aggregation import token_weights
from dynamo_megatron.algorithm.allocation import RolloutAllocator
from dynamo_megatron.algorithm.baseline import Baseline
from dynamo_megatron.algorithm.sequential import Outcomes, Rule, simulated
from dynamo_megatron.config.allocation import SequentialConfig
from dynamo_megatron.evaluation.results import markdown_row

REPLICATES = 5_000  # of the page
PROMPTS = len(SUCCESS_RATES)
IDS = [f"p{i}" for i in range(PROMPTS)]
BUDGET = 16 * PROMPTS
PILOT = {"kind": "pilot", "round_n": 8}
ADA = {"kind": "reinforce_ada", "round_n": 8}


class Design(NamedTuple):
    rule: dict[str, Any] | None  # None: 16 rollouts of each prompt in one round
    advantage: str = "rloo"
    aggregation: str = "prompt_mean"
    weighed: bool = True  # with the weights that the rule gives


DESIGNS = {
    "one round of 16, rloo": Design(None),
    "pilot, rloo, prompt_mean": Design(PILOT),
    "pilot as published: grpo, token_mean": Design(PILOT, "grpo", "token_mean"),
    "pilot, explore .25": Design(PILOT | {"explore": 0.25}),
    "pilot, explore .5": Design(PILOT | {"explore": 0.5}),
    "pilot, explore .25, history": Design(PILOT | {"explore": 0.25}, "history"),
    "reinforce_ada, balanced, prompt_mean": Design(ADA),
    "reinforce_ada as published: balanced, token_mean": Design(ADA, aggregation="token_mean"),
    "reinforce_ada, positive, token_mean": Design(ADA | {"exit": "positive"}, aggregation="token_mean"),
    "fault: explore .25 without the weights": Design(PILOT | {"explore": 0.25}, weighed=False),
}


class Step:
    """The rounds of one mini-batch."""

    def __init__(self, problem: Problem, design: Design, rng: np.random.Generator) -> None:
        self.problem, self.design, self.rng = problem, design, rng
        self.cumulative = problem.policy.probabilities.cumsum(1)
        self.rule = design.rule and Rule(SequentialConfig(**design.rule), BUDGET, 2, 32)

    def sample(self) -> tuple[Outcomes, np.ndarray]:
        """(outcomes, answers int64 [S])."""
        answers = []

        def draw(prompt: np.ndarray) -> np.ndarray:
            places = self.rng.random(len(prompt)) * self.cumulative[prompt, -1]
            answers.append((self.cumulative[prompt] < places[:, None]).sum(1))
            return self.problem.rewards[prompt, answers[-1]] == 1

        chance = self.rng.random(PROMPTS)
        if self.rule:
            seen = simulated(self.rule, PROMPTS, chance, draw)
        else:
            prompt = np.repeat(np.arange(PROMPTS), BUDGET // PROMPTS)
            seen = Outcomes(np.bincount(prompt), 1, prompt, np.zeros(len(prompt), np.int64), draw(prompt))
        return seen, np.concatenate(answers)

    def gradient(self) -> tuple[np.ndarray, int]:
        """(float64 [d], rollouts sampled)."""
        seen, answer = self.sample()
        rows, factors = self.rule.trained(seen) if self.rule else (np.arange(len(answer)), None)
        group = seen.prompt if not self.rule or self.rule.merges else seen.round * PROMPTS + seen.prompt
        advantages = self._advantages(seen, rows, group)
        lengths = LENGTHS[answer[rows]]
        weights = token_weights(self.design.aggregation, lengths, group[rows].tolist(), max_length=LONGEST)
        if factors is not None and self.design.weighed:
            weights = weights * factors
        scores = self.problem.policy.scores[seen.prompt[rows], answer[rows]].reshape(len(rows), -1)
        return (weights * advantages) @ scores, len(answer)

    def _advantages(self, seen: Outcomes, rows: np.ndarray, group: np.ndarray) -> np.ndarray:
        rewards, groups = seen.success[rows].astype(float), group[rows].tolist()
        if self.design.advantage == "history":  # of no earlier step: the second round knows the first
            allocator = RolloutAllocator({"kind": "uniform"})
            first = seen.round == 0
            observed = seen.success[first]
            allocator.observe([IDS[i] for i in seen.prompt[first]], observed.astype(float), observed, 1)
            known = allocator.reward_baseline(IDS).of(seen.prompt)
            strength = np.where(first, 0.0, known.strength)
            return history_advantages(rewards, groups, known.mean, strength)
        if self.rule and self.rule.config.kind == "reinforce_ada":
            left = np.setdiff1d(np.arange(len(seen.prompt)), rows)
            right = np.bincount(seen.prompt[left], seen.success[left], PROMPTS)
            known = Baseline(np.zeros(PROMPTS), np.zeros(PROMPTS))
            known = known.with_rollouts(right, np.bincount(seen.prompt[left], minlength=PROMPTS)).of(seen.prompt[rows])
            return history_advantages(rewards, groups, known.mean, known.strength)
        return group_advantages(rewards, groups, self.design.advantage)


def measure(replicates: int, names: Iterable[str] = DESIGNS) -> dict[str, tuple[Figures, float]]:
    """DESIGNS' keys -> (Figures, rollouts a prompt)."""
    problem, measured = estimators.make_problem(), {}
    gradient = problem.gradient(problem.policy)
    for name in names:
        step = Step(problem, DESIGNS[name], np.random.default_rng(1))
        found, rollouts = zip(*(step.gradient() for _ in range(replicates)), strict=True)
        measured[name] = Figures.of(np.array(found), gradient), float(np.mean(rollouts)) / PROMPTS
    return measured


def table(measured: dict[str, tuple[Figures, float]]) -> str:
    def for_a_rollout(name: str) -> float:
        figures, rollouts = measured[name]
        return figures.variance * rollouts

    head = ["rounds", "bias, %", "rollouts a prompt", "variance"]
    rows = [markdown_row(head), markdown_row(["---", *["---:"] * 3])]
    for name, (figures, rollouts) in measured.items():
        bias = "{:.1f} ({:.1f} to {:.1f})".format(*figures.bias)
        variance = for_a_rollout(name) / for_a_rollout("one round of 16, rloo")
        rows.append(markdown_row([name, bias, f"{rollouts:.1f}", f"{variance:.2f}"]))
    return "\n".join(rows)


if __name__ == "__main__":
    estimators.write_tables(lambda replicates: {"sequential": table(measure(replicates))}, __doc__, REPLICATES)
