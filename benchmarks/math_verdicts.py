"""How the reward `math` and its peers judge the labelled answers of tests/reward/answers.jsonl, and its time.

    python -P benchmarks/math_verdicts.py [--peers PYTHON]

Every pair of reference and response goes through `math`, math-verify alone, verl's `prime_math` and `math_dapo` and
TRL's `accuracy_reward` (JUDGES says how each is called); PYTHON (.venv-peers/bin/python, of `make peers`) has verl and
TRL. A false positive is a wrong answer that is rewarded, a false negative a right one that is not. Writes
benchmarks/results/math_verdicts.json with machine and versions, and prints the table of docs/rewards.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "math_verdicts.json"
PAIRS = ROOT / "tests" / "reward" / "answers.jsonl"
PACKAGES = ("math-verify", "latex2sympy2_extended", "sympy", "verl", "trl", "antlr4-python3-runtime", "pylatexenc")
# name: how it is called. The reference is put between dollar signs where it has none and the peer expects LaTeX.
JUDGES = {
    "math": "dynamo_megatron.reward.math_answer.math_answer(Prompt(answer=reference), response)",
    "math-verify": "verify(parse($reference$), parse(response)), as in its README",
    "prime_math": "verl.utils.reward_score.prime_math.compute_score(response, reference)[0]",
    "math_dapo": "verl.utils.reward_score.math_dapo.compute_score(response, reference)['acc'], not strict_box_verify; "
    "a response with a box has a last line 'Answer: CONTENT OF THE BOX' besides, the form that it asks models for",
    "accuracy_reward": "trl.rewards.accuracy_reward([[{'content': response}]], [$reference$])[0]; None is no reward",
}
OURS = ("math",)  # in this interpreter


def latex(reference: str) -> str:
    return reference if "$" in reference or r"\boxed" in reference else f"${reference}$"


def judge(name: str) -> Callable[[str, str], bool]:
    """The verdict of one of JUDGES on (reference, response); imports what it needs."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    if name == "math":
        from dynamo_megatron.reward.math_answer import math_answer
        from dynamo_megatron.types import Prompt

        return lambda reference, response: math_answer(Prompt("p", text="?", answer=reference), response) == 1.0
    if name == "math-verify":
        from math_verify import parse, verify

        return lambda reference, response: verify(parse(latex(reference)), parse(response))
    if name == "prime_math":
        from verl.utils.reward_score import prime_math

        return lambda reference, response: prime_math.compute_score(response, reference)[0]
    if name == "math_dapo":
        from verl.utils.reward_score import math_dapo

        def dapo(reference: str, response: str) -> bool:
            box = math_dapo.last_boxed_only_string(response.rpartition("</think>")[2])
            line = f"\nAnswer: {' '.join(math_dapo.remove_boxed(box).split())}" if box else ""
            return math_dapo.compute_score(response + line, reference)["acc"]

        return dapo
    from trl.rewards import accuracy_reward

    return lambda reference, response: accuracy_reward([[{"content": response}]], [latex(reference)])[0] == 1.0


def judged(name: str, pairs: list[list[str]]) -> dict[str, Any]:
    """Versions, and [rewarded?, milliseconds, exception] of each pair."""
    verdict, found = judge(name), []
    with contextlib.suppress(Exception):
        verdict("1", r"\boxed{x}")  # imports
    for reference, response in pairs:
        start, right, raised = time.perf_counter(), False, None
        try:
            right = bool(verdict(reference, response))
        except Exception as error:  # a peer may raise anything: it is counted as a verdict of wrong
            raised = type(error).__name__
        found.append([right, 1000 * (time.perf_counter() - start), raised])
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {"versions": versions, "found": found}


def asked(python: str, name: str, pairs: list[list[str]]) -> dict[str, Any]:
    """`judged` in a process of its own; {"exit code"} where it failed."""
    command = [python, "-P", __file__, "--judge", name]
    done = subprocess.run(command, input=json.dumps(pairs), capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        return {"exit code": done.returncode, "log": done.stderr[-500:]}
    return json.loads(done.stdout)


def counts(verdicts: list[tuple[dict[str, Any], bool]]) -> dict[str, Any]:
    """False positives and negatives of (row, rewarded?), and the wrong and right rows that they are of."""
    found = {}
    for want, name in ((0, "false positives"), (1, "false negatives")):
        of = [rewarded for row, rewarded in verdicts if row["want"] == want]
        if of:
            count = sum(rewarded != want for rewarded in of)
            found[name] = {"count": count, "of": len(of), "%": round(100 * count / len(of), 2)}
    return found


def markdown(results: dict[str, Any]) -> str:
    """The table of docs/rewards.md."""
    project = {"prime_math": "verl ", "math_dapo": "verl ", "accuracy_reward": "TRL "}
    lines = ["| | wrong, but rewarded, % | right, but lost, % |", "|---|---:|---:|"]
    for name, found in results["judges"].items():
        shares = [f"{each['%']:.1f}" for each in found["all"].values()]
        lines.append(f"| {project.get(name, '')}`{name}` | {' | '.join(shares)} |")
    return "\n".join(lines)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--peers", default=str(ROOT / ".venv-peers" / "bin" / "python"), help="has verl and TRL")
    arguments.add_argument("--judge", choices=JUDGES, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.judge:
        with contextlib.redirect_stdout(sys.stderr):  # verl prints
            found = judged(options.judge, json.load(sys.stdin))
        print(json.dumps(found))
        return
    sys.path.insert(0, str(Path(__file__).parent))  # not at the top: it imports torch
    from measure import machine

    rows = [json.loads(line) for line in PAIRS.read_text(encoding="utf-8").splitlines()]
    results: dict[str, Any] = {
        "machine": machine([]),
        "pairs": {"wrong": sum(not row["want"] for row in rows), "right": sum(row["want"] for row in rows)},
        "judges": {},
    }
    for name, call in JUDGES.items():
        python = sys.executable if name in OURS else options.peers
        done = asked(python, name, [[row["gold"], row["response"]] for row in rows])
        if "found" not in done:
            sys.exit(f"{name} in {python} ended with exit code {done['exit code']}: {done['log']}")
        rewarded, times, raised = zip(*done["found"], strict=True)
        cuts = statistics.quantiles(times, n=100)
        took = {"p50": cuts[49], "p99": cuts[98], "max": max(times)}
        results["judges"][name] = {
            "call": call,
            "versions": done["versions"],
            "all": counts(list(zip(rows, rewarded, strict=True))),
            "raised": len(raised) - raised.count(None),
            "ms": {key: round(value, 2) for key, value in took.items()},
        }
        print(name, {key: results["judges"][name][key] for key in ("all", "ms")}, flush=True)
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(markdown(results))


if __name__ == "__main__":
    main()
