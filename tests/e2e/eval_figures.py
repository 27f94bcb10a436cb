"""The figures of an evaluation, computed anew from its responses, with nothing of ours.

    python -P tests/e2e/eval_figures.py SCORES

prints those of every `*.jsonl` in the folder that `dynamo-megatron eval` has written.
"""

from __future__ import annotations

import itertools
import json
import sys
from fractions import Fraction
from pathlib import Path


def read(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]


def right(problem: dict) -> list[bool]:
    return [s and status == "ok" for s, status in zip(problem["successes"], problem["statuses"], strict=True)]


def pass_at_k(problem: dict, k: int) -> Fraction:
    """The share of all draws of k different responses that hold a right one."""
    draws = list(itertools.combinations(right(problem), k))
    return Fraction(sum(map(any, draws)), len(draws))


def mean(values: list[Fraction]) -> Fraction:
    return sum(values, Fraction(0)) / len(values)


def set_pass_at_k(file: Path, k: int) -> Fraction:
    return mean([pass_at_k(problem, k) for problem in read(file)])


if __name__ == "__main__":
    for file in sorted(Path(sys.argv[1]).rglob("*.jsonl")):
        problems = read(file)
        samples = min(len(problem["successes"]) for problem in problems)
        for k in sorted({1, samples}):
            print(f"{file}: {len(problems)} problems, pass@{k} {float(set_pass_at_k(file, k)):.6f}")
