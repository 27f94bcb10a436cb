"""Writes the tasks of a small text game (configs/treasure/agent.py), and what a small model learns to play it from.

    python -P tools/treasure_task.py OUT

A task is a pair of places, 3 to 5 moves from each other. In the warm-up data a move goes towards the treasure a share
TOWARDS of the time, and else anywhere, in games that have come so far by such moves. A model that has learnt from them
finds some treasures; rewards tell it which moves were good.

OUT gets warmup.jsonl (prompt and completion), pool.jsonl (what RL trains on), held_out.jsonl (in neither of them), and
model/ (random weights, with the tokenizer and the chat template of tools/calculator_task.py). A second call finds OUT
and does nothing.
"""

from __future__ import annotations

import itertools
import random
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from calculator_task import MODEL, make_tokenizer
from demo_task import arguments, write_task

GAME = runpy.run_path(str(Path(__file__).parents[1] / "configs" / "treasure" / "agent.py"))
SIDE, SPARE, MOVES = GAME["SIDE"], GAME["SPARE"], GAME["MOVES"]
name, distance, moved = GAME["name"], GAME["distance"], GAME["moved"]
TOWARDS = 0.4
NEAREST, FARTHEST = 3, 5
POOL, HELD_OUT, WARMUP = 320, 128, 16384  # tasks; examples
Place = tuple[int, int]


def tasks(seed: int) -> dict[str, list[tuple[Place, Place]]]:
    """(start, treasure) of each."""
    places = list(itertools.product(range(SIDE), repeat=2))
    pairs = [p for p in itertools.permutations(places, 2) if NEAREST <= distance(*p) <= FARTHEST]
    random.Random(seed).shuffle(pairs)
    end = POOL + HELD_OUT
    return {"pool": pairs[:POOL], "held_out": pairs[POOL:end], "warmup": pairs[end:]}


def row(start: Place, treasure: Place) -> dict:
    pair = {"start": name(start), "treasure": name(treasure)}
    return {"id": "-".join(pair.values()), "problem": " ".join(pair.values()), "answer": None, "options": pair}


def choose(at: Place, treasure: Place, generator: random.Random) -> str:
    towards = [move for move in MOVES if distance(moved(at, move), treasure) < distance(at, treasure)]
    return generator.choice(towards if generator.random() < TOWARDS else list(MOVES))


def example(number: int, start: Place, treasure: Place, generator: random.Random) -> dict[str, str]:
    """A game after some moves, and the next one."""
    at, text = start, f"u{name(start)} {name(treasure)}\n>"
    for _ in range(generator.randrange(distance(start, treasure) + SPARE)):
        move = choose(at, treasure, generator)
        if moved(at, move) == treasure:
            break  # the game would end here
        at = moved(at, move)
        text += f"{move}<end>\nu{name(at)}\n>"
    return {"id": str(number), "problem": text, "answer": choose(at, treasure, generator)}


def main() -> None:
    options = arguments(__doc__).parse_args()
    if options.out.exists():
        return print(f"{options.out}: already there")
    generator, pairs = random.Random(options.seed), tasks(options.seed)
    rows = {part: [row(*pair) for pair in pairs[part]] for part in ("pool", "held_out")}
    rows["warmup"] = [example(i, *generator.choice(pairs["warmup"]), generator) for i in range(WARMUP)]
    write_task(options.out, rows, make_tokenizer(), seed=options.seed, **MODEL)


if __name__ == "__main__":
    main()
