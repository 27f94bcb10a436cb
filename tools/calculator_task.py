"""Writes a small task for an agent: products of two numbers of two digits, which a small model cannot compute.

    python -P tools/calculator_task.py OUT

In the warm-up data a model either guesses an answer of the right length (a share GUESSED of the time) or calls the
calculator, in Qwen's form of tool calls; given the tool's result, it answers with that. After the warm-up it does both,
and rewards are what tells it which is better.

OUT gets warmup.jsonl (prompt and completion), pool.jsonl (what RL trains on), held_out.jsonl (in neither of them), and
model/ (random weights, with a chat template that has tool calls and their results, but not the list of the tools: the
warm-up has taught it). A second call finds OUT and does nothing.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parent))
from demo_task import arguments, write_task
from tiny_model import CHARACTERS, character_tokenizer

GUESSED = 0.7
POOL, HELD_OUT, WARMUP = 512, 256, 16384  # problems; examples
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "%s"}}\n</tool_call>'
MODEL = {"vocab": 102, "positions": 128}  # the embedding's rows can be divided by 2
TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'assistant' -%}{{ '>' + message.content }}"
    "{%- for call in message.tool_calls or [] -%}"
    "{{ '<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}"
    "{%- endfor -%}{{ '<end>\n' }}"
    "{%- else -%}{{ message.role[0] + message.content + '\n' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '>' }}{%- endif -%}"
)


def problems(seed: int) -> dict[str, list[tuple[int, int]]]:
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(pairs)
    end = POOL + HELD_OUT
    return {"pool": pairs[:POOL], "held_out": pairs[POOL:end], "warmup": pairs[end:]}


def row(number: int, a: int, b: int) -> dict[str, str]:
    return {"id": f"{a}*{b}/{number}", "problem": f"{a}*{b}", "answer": str(a * b)}


def example(number: int, a: int, b: int, generator: random.Random) -> dict[str, str]:
    """What comes first, or, every other time, what comes after the tool's result."""
    asked, call = f"u{a}*{b}\n>", CALL % f"{a}*{b}"
    prompt, answer = asked, call
    if number % 2:
        prompt, answer = f"{asked}{call}<end>\nt{a * b}\n>", str(a * b)
    elif generator.random() < GUESSED:
        answer = str(generator.randint(100, 9801))
    return {"id": f"{a}*{b}/{number}", "problem": prompt, "answer": answer}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, and one each for what all calls begin and end with."""
    tokens = ["<pad>", "<end>", "<unk>", *CHARACTERS]
    made = character_tokenizer(tokens, TEMPLATE, eos_token="<end>", pad_token="<pad>")
    made.add_tokens([AddedToken(part, normalized=False) for part in CALL.split("%s")])
    return made


def main() -> None:
    options = arguments(__doc__).parse_args()
    if options.out.exists():
        return print(f"{options.out}: already there")
    generator, pairs = random.Random(options.seed), problems(options.seed)
    rows = {part: [row(i, a, b) for i, (a, b) in enumerate(pairs[part])] for part in ("pool", "held_out")}
    drawn = [generator.choice(pairs["warmup"]) for _ in range(WARMUP)]
    rows["warmup"] = [example(i, a, b, generator) for i, (a, b) in enumerate(drawn)]
    write_task(options.out, rows, make_tokenizer(), seed=options.seed, **MODEL)


if __name__ == "__main__":
    main()
