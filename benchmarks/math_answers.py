"""How the reward `math` judges the reference answers of a folder of problems, and where math-verify alone differs.

    python -P benchmarks/math_answers.py FOLDER [NAME ...]

FOLDER has NAME.jsonl, a problem a line with `id` and `answer`; without names, all of them. Every reference is put into
a box as it is, which must be right, and with another last digit (`perturbed`), which must be wrong. The same responses
go through math-verify as its README uses it, and so do the pairs of answers of tests/reward/answer_pairs.py. Writes
benchmarks/results/math_answers.json with machine and versions: counts, and the ids of the exceptions; prints the table
of docs/rewards.md. Sets that are not named keep their figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from math_verify import parse, verify

from dynamo_megatron.config import RewardConfig
from dynamo_megatron.reward import RewardPool
from dynamo_megatron.types import Prompt

RESULTS = Path(__file__).parent / "results" / "math_answers.json"
DEADLINE = 60.0  # seconds an answer, also on a busy machine

logging.getLogger("math_verify").setLevel(logging.ERROR)


def perturbed(answer: str) -> str:
    """`answer` with another last digit; without digits with another last letter where it is text, else with 1 more."""
    answer = answer.strip().removeprefix("$").removesuffix("$")
    if digits := list(re.finditer(r"\d", answer)):
        at = digits[-1].start()
        return f"{answer[:at]}{8 if answer[at] == '9' else int(answer[at]) + 1}{answer[at + 1 :]}"
    if answer.startswith(r"\text{"):
        at = list(re.finditer("[A-Za-z]", answer))[-1].start()
        return answer[:at] + chr(ord(answer[at]) + 1) + answer[at + 1 :]
    return f"{answer} + 1"


def boxed(answer: str) -> str:
    return rf"The answer is \boxed{{{answer}}}."


def with_reward(pairs: Sequence[tuple[str, str]]) -> list[bool]:
    """Whether the reward `math` takes the second answer for the first, of (reference, answer in the box)."""
    pool = RewardPool(RewardConfig(functions=["math"], deadline=DEADLINE, on_error="zero"))
    pool.start()
    prompts = [Prompt(str(i), text="?", answer=reference) for i, (reference, _) in enumerate(pairs)]

    async def score() -> list[bool]:
        answers = (boxed(given) for _, given in pairs)
        scores = await asyncio.gather(*(pool.score(p, a) for p, a in zip(prompts, answers, strict=True)))
        return [score.success for score in scores]

    try:
        return asyncio.run(score())
    finally:
        pool.close()


def with_math_verify(pairs: Sequence[tuple[str, str]]) -> list[bool]:
    def equal(reference: str, given: str) -> bool:
        reference = reference.strip().removeprefix("$").removesuffix("$")
        return verify(parse(f"${reference}$"), parse(boxed(given)))

    return [equal(*pair) for pair in pairs]


def examined(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts, and the ids of what is not as it should be, by judge."""
    same = [(row["answer"], row["answer"]) for row in rows]
    other = [(row["answer"], perturbed(row["answer"])) for row in rows]
    found: dict[str, Any] = {"answers": len(rows)}
    verdicts = {}
    for name, judge in (("math", with_reward), ("math-verify", with_math_verify)):
        verdicts[name] = judge([*same, *other])
        equal, differ = verdicts[name][: len(rows)], verdicts[name][len(rows) :]
        found[name] = {
            "not equal to itself": [row["id"] for row, right in zip(rows, equal, strict=True) if not right],
            "equal to the perturbed one": [row["id"] for row, right in zip(rows, differ, strict=True) if right],
        }
    found["agree, of twice as many"] = sum(a == b for a, b in zip(*verdicts.values(), strict=True))
    return found


def of_pairs(rows: Sequence[tuple[str, str, str, bool]]) -> dict[str, int]:
    """How many of (rule, reference, answer, equal?) each judge sees as the table does."""
    ours, alone = (judge([row[1:3] for row in rows]) for judge in (with_reward, with_math_verify))
    expected = [row[3] for row in rows]
    return {
        "equal": sum(expected),
        "different": len(rows) - sum(expected),
        "math": sum(a == b for a, b in zip(ours, expected, strict=True)),
        "math-verify": sum(a == b for a, b in zip(alone, expected, strict=True)),
    }


def markdown(results: dict[str, Any]) -> str:
    """The table of docs/rewards.md."""
    lines = [
        "| references | answers | `math`: unchanged, scored wrong | `math`: changed, scored right | math-verify: "
        "unchanged, scored wrong | math-verify: changed, scored right | both agree, % |",
        "|---|" + "---:|" * 6,
    ]
    for name, found in results["sets"].items():
        faults = [str(len(ids)) for judge in ("math", "math-verify") for ids in found[judge].values()]
        agree = f"{100 * found['agree, of twice as many'] / found['answers'] / 2:.1f}"
        lines.append(f"| {' | '.join([name, str(found['answers']), *faults, agree])} |")
    return "\n".join(lines)


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))  # not at the top: it imports torch
    from measure import machine

    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("name", nargs="*")
    options = arguments.parse_args()
    files = sorted(options.folder.glob("*.jsonl"))
    names = options.name or [file.stem for file in files if "answer" in read(file)[0]]
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "reward"))
    from answer_pairs import pairs

    before = json.loads(RESULTS.read_text())["sets"] if RESULTS.is_file() else {}
    results = {"machine": machine(["math-verify", "sympy"]), "pairs": of_pairs(pairs()), "sets": before}
    for name in names:
        found = results["sets"][name] = examined(read(options.folder / f"{name}.jsonl"))
        print(name, json.dumps(found), flush=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(results["pairs"])
    print(markdown(results))


if __name__ == "__main__":
    main()
