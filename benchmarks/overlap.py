"""How long the comparison of an evaluation with the training data takes.

    python -P benchmarks/overlap.py [--prompts 100000]

Makes training prompts of 60 to 140 words, of 20,000 whose frequencies fall as Zipf's law says, and 1,500
problems of an evaluation, one of a hundred of them from the training prompts; then the same with an instruction of 45
words before every text of both. Reading and parsing a file is not in it. Writes benchmarks/results/overlap.json with
machine and versions.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

from dynamo_megatron.evaluation.overlap import overlaps
from dynamo_megatron.types import Prompt

RESULTS = Path(__file__).parent / "results" / "overlap.json"
VOCABULARY, PROBLEMS, EVERY = 20_000, 1500, 100


def texts(count: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    words = np.array([f"word{i}" for i in range(VOCABULARY)])
    share = 1 / np.arange(1, VOCABULARY + 1)
    lengths = rng.integers(60, 141, count)
    drawn = words[rng.choice(VOCABULARY, lengths.sum(), p=share / share.sum())]
    return [" ".join(part) for part in np.split(drawn, np.cumsum(lengths)[:-1])]


def prompts(kind: str, instruction: str, made: list[str]) -> list[Prompt]:
    return [Prompt(f"{kind}-{i}", text=f"{instruction} {text}", answer="1") for i, text in enumerate(made)]


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))  # not at the top: it imports torch
    from measure import machine

    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--prompts", type=int, default=100_000)
    count = arguments.parse_args().prompts
    results = {"machine": machine(["numpy"]), "prompts": count, "problems": PROBLEMS}
    training, evaluation = texts(count, 0), texts(PROBLEMS, 1)
    evaluation[::EVERY] = training[: len(evaluation[::EVERY])]
    instruction = " ".join(f"please{i}" for i in range(45))
    for name, before in (("plain", ""), ("with an instruction", instruction)):
        problems, trained = prompts("problem", before, evaluation), prompts("training", before, training)
        start = time.perf_counter()
        found = overlaps(problems, trained)
        results[name] = {"seconds": time.perf_counter() - start, "found": len(found)}
        print(name, results[name], flush=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
