"""How long it takes to find the tokens of a response's steps, and how long an event loop waits meanwhile.

    python -P benchmarks/token_spans.py TOKENIZER.json [--tokens 4096] [--responses 32]

The steps are the lines of made solutions. The spans are found in a thread beside the event loop, as a run does, and
in the event loop itself. The wait is the longest time that the loop took for a sleep of 1 ms. Writes
benchmarks/results/token_spans.json with machine and versions.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tokenizers import Tokenizer

from dynamo_megatron.rollout.token_spans import token_spans

RESULTS = Path(__file__).parent / "results" / "token_spans.json"
WORDS = ["then", "we", "have", "so", "that", "therefore", "the", "number", "of", "where", "is", "product", "square"]


def response(tokenizer: Tokenizer, tokens: int, seed: int) -> tuple:
    """The arguments of `token_spans`."""
    draw = random.Random(seed)

    def line() -> str:
        words = " ".join(draw.choices(WORDS, k=12))
        return f"{words} $x_{draw.randrange(9)} = {draw.randrange(10**4)} + \\frac{{{draw.randrange(99)}}}{{7}}$\n"

    ids = tokenizer.encode("".join(line() for _ in range(tokens // 12)), add_special_tokens=False).ids[:tokens]
    text, steps, start = tokenizer.decode(ids, skip_special_tokens=True), [], 0
    for part in text.splitlines(keepends=True):
        steps.append((start, start + len(part), 1.0))
        start += len(part)
    return steps, ids, text, tokenizer


async def measured(responses: list[tuple], located: Callable) -> dict[str, float]:
    """Seconds a response, and the longest sleep of 1 ms."""
    waits = [0.0]

    async def ticks() -> None:
        while True:
            start = time.perf_counter()
            await asyncio.sleep(0.001)
            waits.append(time.perf_counter() - start)

    ticking = asyncio.create_task(ticks())
    await asyncio.sleep(0.05)
    waits.clear()
    start = time.perf_counter()
    for each in responses:
        await located(each)
    seconds = (time.perf_counter() - start) / len(responses)
    await asyncio.sleep(0.05)  # what the loop could not do meanwhile
    ticking.cancel()
    return {"seconds a response": seconds, "longest wait": max(waits), "mean wait": sum(waits) / len(waits)}


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))  # not at the top: it imports torch
    from measure import machine

    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("tokenizer")
    arguments.add_argument("--tokens", type=int, default=4096)
    arguments.add_argument("--responses", type=int, default=32)
    options = arguments.parse_args()
    tokenizer, thread = Tokenizer.from_file(options.tokenizer), ThreadPoolExecutor(1)
    responses = [response(tokenizer, options.tokens, seed) for seed in range(options.responses)]
    results = {
        "machine": machine(["tokenizers"]),
        "vocabulary": tokenizer.get_vocab_size(),
        "tokens": len(responses[0][1]),
        "steps": len(responses[0][0]),
    }

    async def beside(arguments: tuple) -> None:
        await asyncio.get_running_loop().run_in_executor(thread, token_spans, *arguments)

    async def within(arguments: tuple) -> None:
        token_spans(*arguments)

    for name, located in (("in a thread", beside), ("in the event loop", within)):
        results[name] = asyncio.run(measured(responses, located))
        print(name, results[name], flush=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
