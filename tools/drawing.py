"""What the rules of `data.selection` estimate: Monte-Carlo against a known gradient.

    python -P tools/drawing.py [--replicates N] [--write]

Prints the table `drawing` of docs/estimators.md; --write puts it there. Problem and figures are those of estimators.py.
Streams, rules, history, advantages and weights are the trainer's own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from estimators import LENGTHS, LONGEST, Figures, Problem, advantages_of, draws, make_problem, write_tables

from dynamo_megatron.algorithm.aggregation import token_weights
from dynamo_megatron.algorithm.allocation import RolloutAllocator
from dynamo_megatron.config import DataConfig
from dynamo_megatron.data import PromptStream
from dynamo_megatron.data.selection import PromptSelection
from dynamo_megatron.evaluation.results import markdown_row
from dynamo_megatron.types import Prompt

REPLICATES = 4_000  # of the page
DRAWN, ROLLOUTS = 4, 16  # prompts of a mini-batch, and the rollouts of each
VISITS, SEEN = 3, 8  # earlier visits of every prompt, and the rollouts of each
RULES = {
    "uniform": {"kind": "uniform"},
    "priority": {"kind": "priority", "candidates": None},
    "priority, weights": {"kind": "priority", "candidates": None, "weights": True},
    "thompson": {"kind": "thompson", "candidates": None},
    "greso": {"kind": "greso"},
}


def selection(rule: dict, seed: int, prompts: int) -> tuple[PromptSelection, RolloutAllocator]:
    """Over a pool of that many prompts, whose order is `seed`'s."""
    config = DataConfig(source="none", shuffle_seed=seed, selection=rule)
    items = [Prompt(str(i), text="x") for i in range(prompts)]
    stream = PromptStream(items, config, lambda prompt: [1], None)
    allocator = RolloutAllocator({})
    return PromptSelection(config, stream, allocator.history), allocator


def drawn_weights(rule: dict, success: np.ndarray, replicates: int) -> np.ndarray:
    """float64 [replicates, P]: the sum of the weights with which each prompt is drawn, after visits of its own."""
    rng, prompts = np.random.default_rng(2), len(success)
    ids = [str(i) for i in range(prompts) for _ in range(SEEN)]
    total = np.zeros((replicates, prompts))
    for replicate in range(replicates):
        chosen, allocator = selection(rule, replicate, prompts)
        for visit in range(1, VISITS + 1):
            right = rng.random(len(ids)) < np.repeat(success, SEEN)
            allocator.observe(ids, right.astype(float), right, visit)
            seen = SimpleNamespace(prompt_ids=ids, group_ids=ids, rewards=right.astype(float), successes=right)
            chosen.observe(visit, seen)
        for prompt in chosen.draw(VISITS + 1, 0, DRAWN, lambda: None):
            total[replicate, int(prompt.prompt_id)] += prompt.weight
    return total


def prompt_gradients(problem: Problem, replicates: int) -> np.ndarray:
    """Of each prompt's ROLLOUTS rollouts, as it stands in a mini-batch of DRAWN, float64 [replicates, P, d]."""
    prompts = len(problem.rewards)
    parts = []
    for prompt, answer in draws(problem, np.full(prompts, ROLLOUTS), replicates):
        scores = problem.policy.scores[prompt, answer].reshape(*answer.shape, -1)
        weights = np.array([token_weights("prompt_mean", LENGTHS[a], prompt, max_length=LONGEST) for a in answer])
        pulls = (weights * advantages_of(problem, prompt, answer, "rloo"))[..., None] * scores
        parts.append(pulls.reshape(len(answer), prompts, ROLLOUTS, -1).sum(2) * prompts / DRAWN)
    return np.concatenate(parts)


def measure(replicates: int) -> dict[str, Figures]:
    """RULES' keys -> Figures."""
    problem = make_problem()
    gradient, own = problem.gradient(problem.policy), prompt_gradients(problem, replicates)
    return {
        name: Figures.of(
            np.einsum("rp,rpd->rd", drawn_weights(rule, problem.success, replicates), own),
            gradient,
        )
        for name, rule in RULES.items()
    }


def table(measured: dict[str, Figures]) -> str:
    unit = measured["uniform"].variance
    rows = [markdown_row(["data.selection", "bias, %", "along, %", "variance"]), markdown_row(["---", *["---:"] * 3])]
    for name, figures in measured.items():
        bias = "{:.1f} ({:.1f} to {:.1f})".format(*figures.bias)
        rows.append(
            markdown_row([name, bias, f"{100 * LONGEST * figures.scale[0]:.0f}", f"{figures.variance / unit:.2f}"])
        )
    return "\n".join(rows)


if __name__ == "__main__":
    write_tables(lambda replicates: {"drawing": table(measure(replicates))}, __doc__, REPLICATES)
