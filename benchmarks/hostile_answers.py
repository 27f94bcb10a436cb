"""What scoring costs, and what hostile responses do to it.

    python -P benchmarks/hostile_answers.py

Times one test of each kind of the reward `code` in one sandbox. Then scores responses with two pools of workers, one
with `math` and `format`, one with `code`: sound responses; a mix of which 2 % are made to hang, to crash or to use up
what scores them; sound ones again. Reports the outcomes, the sound responses a second before and after, and the
processes left. Writes benchmarks/results/hostile_answers.json with machine and versions, and prints the table of
docs/rewards.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from dynamo_megatron.config import RewardConfig
from dynamo_megatron.reward import RewardPool, Score
from dynamo_megatron.reward.functions import load_function
from dynamo_megatron.runtime.process_signals import adopt_orphans
from dynamo_megatron.types import Prompt

RESULTS = Path(__file__).parent / "results" / "hostile_answers.json"
EVERY = 50  # one response in 50 is hostile
SUM = Prompt("sum", text="?", answer={"inputs": ["1 2"], "outputs": ["3"]})
SUM_CALL = Prompt("call", text="?", answer={"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]})
SUM_ASSERT = Prompt("assert", text="?", answer=["assert add(1, 2) == 3"])
THREE = Prompt("three", text="?", answer="3")
TEXT = {"functions": ["math", "format"], "format": {"pattern": "(a+)+b|(?!a).*"}, "deadline": 10.0}
# A machine that is busy with other work must not end the sound ones.
CODE = {"functions": ["code"], "code": {"seconds": 30.0, "cpu_seconds": 2}, "deadline": 60.0}


def program(source: str) -> str:
    return f"```python\n{source}\n```"


SOUND_TEXT, SOUND_PROGRAM = r"So it is \boxed{3}.", program("print(sum(map(int, input().split())))")
HOSTILE_TEXT = [
    "a" * 60,  # the pattern takes exponential time
    "\\boxed{" * 20_000,
    "\\boxed{" + "\\frac{1}{" * 2_000 + "3" + "}" * 2_001,
    "\\boxed{" + "(" * 5_000 + "3" + ")" * 5_000 + "}",
    "\\boxed{9^9^9^9^9}",
    "\ud800\udfff\x00\\boxed{\ud800}",
    "$x$ " * 250_000,
    "\\boxed{" + "9" * 1_000_000 + "}",
]
HOSTILE_PROGRAMS = [
    program(source)
    for source in (
        "while True: pass",
        "import time; time.sleep(60)",
        "import os\nwhile True: os.fork()",
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,)).start()",
        "x = bytearray(1 << 30)\nprint(3)",
        "import re; re.match('(a+)+b', 'a' * 60)",
        "while True: print('x' * 10_000)",
        "n = 0\nwhile True:\n    n += 1\n    open(f'/tmp/{n}', 'wb').write(bytes(1 << 20))",
        "import ctypes; ctypes.string_at(0)",
        "import os; os.kill(os.getppid(), 9); os.kill(os.getpid(), 9)",
        "x = " + "(" * 500_000,
        "x = '" + "x" * 1_000_000 + "'",
        "\ud800 = 1",
        "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    )
]


def mixed(sound: str, hostile: Sequence[str], count: int) -> list[str]:
    """`count` responses, those at EVERY - 1, 2 EVERY - 1, ... from `hostile` in turn."""
    return [hostile[i // EVERY % len(hostile)] if i % EVERY == EVERY - 1 else sound for i in range(count)]


def scored(pool: RewardPool, prompt: Prompt, responses: Sequence[str]) -> tuple[list[Score], float]:
    """The scores, and the seconds that they took."""

    async def gathered() -> list[Score]:
        return await asyncio.gather(*(pool.score(prompt, response) for response in responses))

    start = time.perf_counter()
    return asyncio.run(gathered()), time.perf_counter() - start


def cpu_seconds() -> float:
    """CPU time of the child processes that run, with that of their own children that have ended."""
    return sum(sum(child.cpu_times()[:4]) for child in psutil.Process().children(recursive=True))


def processes_left() -> int:
    """Descendants of this process that run. After `adopt_orphans` those whose parents have ended are among them."""
    children = psutil.Process().children(recursive=True)
    return sum(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)


def sound_rates(pool: RewardPool, prompt: Prompt, sound: str, count: int) -> dict[str, float]:
    """`count` sound responses a second, and the CPU time of one, which other work on the machine changes less."""
    scored(pool, prompt, [sound] * 20)  # workers that have just started import first
    before = cpu_seconds()
    _, took = scored(pool, prompt, [sound] * count)
    return {"a second": round(count / took, 1), "CPU ms each": round(1000 * (cpu_seconds() - before) / count, 3)}


def attacked(
    settings: dict[str, Any], prompt: Prompt, sound: str, hostile: Sequence[str], count: int, timed: int
) -> dict[str, Any]:
    """`count` mixed responses, and `timed` sound ones before and after them."""
    pool = RewardPool(RewardConfig(**settings, on_error="zero", workers=2))
    pool.start()
    try:
        before = sound_rates(pool, prompt, sound, timed)
        scores, took = scored(pool, prompt, mixed(sound, hostile, count))
        after = sound_rates(pool, prompt, sound, timed)
    finally:
        pool.close()
    outcomes = Counter((i % EVERY == EVERY - 1, score.status, score.success) for i, score in enumerate(scores))
    names = ("hostile", "status", "success")
    return {
        "outcomes": [{**dict(zip(names, key, strict=True)), "count": n} for key, n in sorted(outcomes.items())],
        "seconds": round(took, 2),
        "sound responses before": before,
        "sound responses after": after,
        "processes left": processes_left(),
    }


def seconds_a_test(rounds: int) -> dict[str, float]:
    """Median seconds of one test of each kind."""
    code = load_function("code", RewardConfig(functions=["code"]))
    add = program("def add(a, b): return a + b")
    kinds: dict[str, Callable[[], float]] = {
        "streams": lambda: code(SUM, SOUND_PROGRAM),
        "call": lambda: code(SUM_CALL, add),
        "assertion": lambda: code(SUM_ASSERT, add),
    }
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, test in kinds.items():
            start = time.perf_counter()
            assert test() == 1.0
            found[name].append(time.perf_counter() - start)
    return {name: round(statistics.median(times), 4) for name, times in found.items()}


def markdown(results: dict[str, Any]) -> str:
    """The table of docs/rewards.md."""
    kinds = [results["texts"], results["programs"]]

    def counts(hostile: bool, **wanted: object) -> list[str]:
        found = [[each for each in kind["outcomes"] if each["hostile"] == hostile] for kind in kinds]
        return [
            str(sum(each["count"] for each in kind if all(each[key] == value for key, value in wanted.items())))
            for kind in found
        ]

    rows = [
        ("sound responses", counts(False)),
        ("of these scored as right", counts(False, status="ok", success=True)),
        ("hostile responses", counts(True)),
        ("of these scored as wrong", counts(True, status="ok", success=False)),
        ("of these timed out", counts(True, status="reward_timeout")),
        ("of these failed", counts(True, status="reward_error")),
    ]
    for name, key in (("sound responses a second", "a second"), ("CPU time of a sound response, ms", "CPU ms each")):
        for when in ("before", "after"):
            rows.append((f"{name}, {when}", [str(kind[f"sound responses {when}"][key]) for kind in kinds]))
    rows.append(("processes left", [str(kind["processes left"]) for kind in kinds]))
    head = ["| | `math`, `format` | `code` |", "|---|---:|---:|"]
    return "\n".join([*head, *(f"| {name} | {' | '.join(values)} |" for name, values in rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=8000, help="responses scored by math and format")
    parser.add_argument("--programs", type=int, default=2000, help="responses scored by code")
    parser.add_argument("--timed", type=int, default=400, help="sound ones, before and after")
    parser.add_argument("--rounds", type=int, default=50, help="of one test of each kind")
    asked = parser.parse_args()
    adopt_orphans()  # else what escapes the pool is init's child
    # Not at the top: it imports torch, which the tests of what is above need not wait for.
    sys.path.insert(0, str(Path(__file__).parent))
    from measure import machine

    results = {
        "machine": machine(["mpmath"]),
        "seconds a test": seconds_a_test(asked.rounds),
        "texts": attacked(TEXT, THREE, SOUND_TEXT, HOSTILE_TEXT, asked.texts, asked.timed),
        "programs": attacked(CODE, SUM, SOUND_PROGRAM, HOSTILE_PROGRAMS, asked.programs, asked.timed),
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(markdown(results))


if __name__ == "__main__":
    main()
