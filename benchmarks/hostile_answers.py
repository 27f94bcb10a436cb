"""What scoring costs, and what hostile responses do to it.

    python -P benchmarks/hostile_answers.py

Times one test of each kind of the reward `code` in one sandbox. Then scores responses with two pools of workers, one
with `math` and `format`, one with `code`: sound responses; a mix of which 2 % are made to hang, to crash or to use up
what scores them; sound ones again. Reports the outcomes, the sound responses a second before and after, and the
processes left. Writes benchmarks/results/hostile_answers.json with machine and versions.
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
from dynamo_megatron.types import Prompt

RESULTS = Path(__file__).parent / "results" / "hostile_answers.json"
EVERY = 50  # one response in 50 is hostile
SUM = Prompt("sum", text="?", answer={"inputs": ["1 2"], "outputs": ["3"]})
SUM_CALL = Prompt("call", text="?", answer={"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]})
SUM_ASSERT = Prompt("assert", text="?", answer=["assert add(1, 2) == 3"])
THREE = Prompt("three", text="?", answer="3")
TEXT = {"functions": ["math", "format"], "format": {"pattern": "(a+)+b|(?!a).*"}, "deadline": 4.0}
CODE = {"functions": ["code"], "code": {"seconds": 4.0, "cpu_seconds": 2}, "deadline": 8.0}


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


def attacked(
    settings: dict[str, Any], prompt: Prompt, sound: str, hostile: Sequence[str], count: int, timed: int
) -> dict[str, Any]:
    """`count` mixed responses, and `timed` sound ones before and after them."""
    pool = RewardPool(RewardConfig(**settings, on_error="zero", workers=2))
    pool.start()
    try:
        scored(pool, prompt, [sound] * 20)
        _, before = scored(pool, prompt, [sound] * timed)
        scores, took = scored(pool, prompt, mixed(sound, hostile, count))
        scored(pool, prompt, [sound] * 20)  # the last workers to be replaced import first
        _, after = scored(pool, prompt, [sound] * timed)
    finally:
        pool.close()
    outcomes = Counter((i % EVERY == EVERY - 1, score.status, score.success) for i, score in enumerate(scores))
    names = ("hostile", "status", "success")
    return {
        "outcomes": [{**dict(zip(names, key, strict=True)), "count": n} for key, n in sorted(outcomes.items())],
        "seconds": round(took, 2),
        "sound responses a second before": round(timed / before, 1),
        "sound responses a second after": round(timed / after, 1),
        "processes left": len(psutil.Process().children(recursive=True)),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=8000, help="responses scored by math and format")
    parser.add_argument("--programs", type=int, default=2000, help="responses scored by code")
    parser.add_argument("--timed", type=int, default=400, help="sound ones, before and after")
    parser.add_argument("--rounds", type=int, default=50, help="of one test of each kind")
    asked = parser.parse_args()
    # Not at the top: it imports torch, which the tests of what is above need not wait for.
    sys.path.insert(0, str(Path(__file__).parent))
    from measure import machine

    results = {
        "machine": machine(["math-verify"]),
        "seconds a test": seconds_a_test(asked.rounds),
        "texts": attacked(TEXT, THREE, SOUND_TEXT, HOSTILE_TEXT, asked.texts, asked.timed),
        "programs": attacked(CODE, SUM, SOUND_PROGRAM, HOSTILE_PROGRAMS, asked.programs, asked.timed),
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
