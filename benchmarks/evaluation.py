"""The figures of an evaluation, computed anew from its responses without the package's code.

    python -P benchmarks/evaluation.py SCORES

SCORES is a folder that `dynamo-megatron eval` has written for one model and one set whose answers are numbers, such as
GSM8K. pass@k is computed as the share of all draws of k different responses that contain a right one. A second rule
decides on its own which responses are right: those whose last number is the answer. Writes
benchmarks/results/evaluation.json with machine, versions and settings; prints the table for docs/data.md, which belongs
between the marks `gsm8k`. The exit code is 1 if a figure of `eval` differs from the
computed one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml

RESULTS = Path(__file__).parent / "results" / "evaluation.json"
ROUNDING = 1e-12


def right(problem: dict[str, Any]) -> list[bool]:
    """Of each response: whether the reward took it for right."""
    return [s and status == "ok" for s, status in zip(problem["successes"], problem["statuses"], strict=True)]


def ends_with_answer(problem: dict[str, Any]) -> list[bool]:
    """Of each response: whether its last number is the answer."""
    found = [re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", "")) for text in problem["responses"]]
    return [bool(numbers) and float(numbers[-1]) == float(problem["answer"].replace(",", "")) for numbers in found]


def pass_at_k(problems: Sequence[Sequence[bool]], k: int) -> Fraction:
    """The mean over the problems, of the share of draws that contain a right response."""
    draws = [[any(draw) for draw in itertools.combinations(each, k)] for each in problems]
    return sum((Fraction(sum(each), len(each)) for each in draws), Fraction(0)) / len(draws)


def examined(folder: Path) -> dict[str, Any]:
    """What `eval` says, and what its responses say."""
    lines = (folder / "problems.jsonl").read_text(encoding="utf-8").split("\n")
    problems = [json.loads(line) for line in lines if line]
    said = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    verdicts, others = [right(each) for each in problems], [ends_with_answer(each) for each in problems]
    lengths = [length for each in problems for length in each["lengths"]]
    reasons = [reason for each in problems for reason in each["finish_reasons"]]
    computed = {f"eval/pass@{k}": float(pass_at_k(verdicts, k)) for k in config["eval"]["k"]}
    computed |= {
        "eval/problems": len(problems),
        "eval/samples": len(lengths),
        "eval/length_mean": sum(lengths) / len(lengths),
        "eval/truncated": reasons.count("length") / len(reasons),
    }
    pairs = list(zip(itertools.chain(*verdicts), itertools.chain(*others), strict=True))
    return {
        "settings": {"model": config["model"]["path"], **config["eval"]},
        "eval": said,
        "computed": computed,
        "responses": {
            "right by the reward": sum(a for a, _ in pairs),
            "right by the last number": sum(b for _, b in pairs),
            "same verdict": sum(a == b for a, b in pairs),
        },
    }


def differing(results: dict[str, Any]) -> list[str]:
    """The figures of `eval` that are not the computed ones."""
    return [key for key, value in results["computed"].items() if abs(results["eval"][key] - value) > ROUNDING]


def markdown(results: dict[str, Any]) -> str:
    """The table of docs/data.md."""
    said, computed, counts = results["eval"], results["computed"], results["responses"]
    lines = ["| figure | `eval` (95 %) | computed anew |", "|---|---:|---:|"]
    for k in results["settings"]["k"]:
        low, high = (100 * said[f"eval/pass@{k}{end}"] for end in ("_low", "_high"))
        ours, anew = (100 * each[f"eval/pass@{k}"] for each in (said, computed))
        lines.append(f"| pass@{k}, % | {ours:.3f} ({low:.1f} to {high:.1f}) | {anew:.3f} |")
    for name, key, factor in (("length, tokens", "length_mean", 1), ("truncated, %", "truncated", 100)):
        lines.append(f"| {name} | {factor * said[f'eval/{key}']:.3f} | {factor * computed[f'eval/{key}']:.3f} |")
    by_number, same = counts["right by the last number"], counts["same verdict"]
    lines.append(
        f"| right responses, of {computed['eval/samples']} | {counts['right by the reward']} | {by_number} by a "
        "simpler rule: a response is right if its last number is the answer. "
        f"The rule and `eval` give the same verdict on {same} |"
    )
    return "\n".join(lines)


def main() -> int:
    sys.path.insert(0, str(Path(__file__).parent))  # not at the top: it imports torch
    from measure import machine

    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("scores", type=Path)
    results = {"machine": machine(["sglang", "torch", "transformers"]), **examined(arguments.parse_args().scores)}
    results["settings"]["data"] = Path(results["settings"]["data"]).name  # not where this machine has it
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(markdown(results))
    if found := differing(results):
        print(f"not as computed: {', '.join(found)}", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
