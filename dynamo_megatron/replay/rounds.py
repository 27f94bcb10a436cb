"""Simulates the rules that use a step's outcomes (`algorithm.sequential`): what they would sample and train on.

A record has a fixed number of rollouts per visit, and such a rule may request more. So the outcomes of all rollouts are
drawn at random. A rollout is right with probability p, the prompt's success rate over the whole record, by which
allocators are judged too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dynamo_megatron.algorithm.advantages import informative
from dynamo_megatron.algorithm.sequential import Rule, simulated
from dynamo_megatron.config.allocation import SequentialConfig
from dynamo_megatron.replay.recording import RecordedStep
from dynamo_megatron.replay.what_if import degenerate_chance

DRAWS = 5  # simulations of every step


def published_rules(prompts: int, budget: int) -> dict[str, Rule]:
    """The rules with their published proportions, for a step of `budget` rollouts. pilot: half of the budget in the
    first round; a prompt gets up to four times its rollouts of the first round. reinforce_ada: up to 4 rounds of 8,
    whatever the budget."""
    first = max(2, budget // (2 * prompts))
    ada = {"kind": "reinforce_ada", "round_n": 8}
    return {
        "pilot": Rule(SequentialConfig(round_n=first), budget, 2, 4 * first),
        "reinforce_ada": Rule(SequentialConfig(**ada), budget, 2, 32),
        "reinforce_ada, positive": Rule(SequentialConfig(**ada, exit="positive"), budget, 2, 32),
    }


def rounds(steps: Sequence[RecordedStep], rates: np.ndarray) -> dict[str, dict[str, float]]:
    """For every rule, sums over the record, averaged over DRAWS simulations: `rollouts` sampled, rollouts `trained` on,
    and `groups` trained on whose rewards differ. `rates`: p of every visit, float64 [V]."""
    found: dict[str, dict[str, int]] = {}
    rng, place = np.random.default_rng(0), 0
    for step in steps:
        p = rates[place : place + len(step.prompt_ids)]
        place += len(p)
        for name, rule in published_rules(len(p), step.budget).items():
            total = found.setdefault(name, {"rollouts": 0, "trained": 0, "groups": 0})
            for _ in range(DRAWS):
                seen = simulated(rule, len(p), rng.random(len(p)), lambda who, p=p: rng.random(len(who)) < p[who])
                rows = rule.trained(seen).rows
                prompt = seen.prompt[rows]
                differs = informative(seen.success[rows].astype(float), prompt.tolist())
                total["rollouts"] += len(seen.prompt)
                total["trained"] += len(rows)
                total["groups"] += len(np.unique(prompt[differs]))
    return {name: {key: value / DRAWS for key, value in total.items()} for name, total in found.items()}


def one_round(rates: np.ndarray, counts: np.ndarray) -> dict[str, float]:
    """The expected values of the same numbers for counts that do not depend on outcomes, int64 [V]."""
    rollouts = float(counts.sum())
    return {"rollouts": rollouts, "trained": rollouts, "groups": float((1 - degenerate_chance(rates, counts)).sum())}
