"""Writes a small task: problems, warm-up data that is partly wrong, a tokenizer of their text, a small Qwen2 model.

    python -P tools/demo_task.py OUT [--task classes] [--teacher]

Task `sums`, the demo's: sums of two numbers of at most two digits. In the warm-up data an answer is wrong with a
probability that depends on the last digit of the first number, from 0 to 0.995: after it the model is good at some
kinds of problem and bad at others, as a pretrained model is, and rewards are what tells it which.

Task `classes`: a letter names one of 48 classes, and a class has a secret key of four digits. The answer to "Q4071=" is
4071 with Q's key added digit by digit, without carrying. In the warm-up data one or two digits of each class's answers
are uncertain: a share RIGHT of the answers has the right digit there, the others a rival. Nothing that is learnt of one
class helps with another, so that the noise of the gradient is what limits progress.

`--teacher`, of `sums`: right answers in the warm-up data, and a model of twice the width.

OUT gets warmup.jsonl (prompt and completion), pool.jsonl (what RL trains on), for `sums` held_out.jsonl (in neither of
them), and model/ (random weights). A second call finds OUT and does nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import string
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config
from transformers.utils.logging import disable_progress_bar

Rows = dict[str, list[dict[str, str]]]  # of each file

WRONG = (0, 0.03, 0.1, 0.3, 0.6, 0.85, 0.95, 0.98, 0.99, 0.995)  # by the last digit of the first number
POOL, HELD_OUT, DRAWS = 512, 1024, 16  # problems; warm-up answers drawn for each of the other problems

CLASSES, DIGITS = string.ascii_letters[:48], 4
RIGHT = (0.2, 0.6, 0.85, 0.95)  # share of the warm-up answers that have the right digit in an uncertain place
PER_CLASS, WARMUP_PER_CLASS = 4, 1000  # problems of the pool, of the warm-up


def sums(seed: int, right: bool = False) -> Rows:
    """All 10,000 pairs, in a seeded order, cut into the three parts. `right`: no wrong answers in the warm-up data."""
    pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(seed).shuffle(pairs)
    pool, held_out, others = pairs[:POOL], pairs[POOL : POOL + HELD_OUT], pairs[POOL + HELD_OUT :]
    generator, warmup = random.Random(f"warmup/{seed}"), []
    for draw in range(DRAWS):
        for a, b in others:
            answer = a + b
            if not right and generator.random() < WRONG[a % 10]:
                answer += generator.randint(1, 9)
            # an id a draw: the answers of one problem differ
            warmup.append({"id": f"{a}+{b}/{draw}", "problem": f"{a}+{b}=", "answer": str(answer)})
    rows = {
        part: [{"id": f"{a}+{b}", "problem": f"{a}+{b}=", "answer": str(a + b)} for a, b in its]
        for part, its in (("pool", pool), ("held_out", held_out))
    }
    return rows | {"warmup": warmup}


def classes(seed: int) -> Rows:
    """Every class has as many problems as any other, in both parts."""
    generator, pool, warmup = random.Random(seed), [], []
    for number, name in enumerate(CLASSES):
        key = [generator.randrange(10) for _ in range(DIGITS)]
        rival = [(digit + generator.randint(1, 9)) % 10 for digit in key]
        # Classes with one and with two uncertain places alternate; each share of RIGHT comes up as often as any other.
        places = generator.sample(range(DIGITS), 1 + number % 2)
        rates = (RIGHT[number // 2 % len(RIGHT)], RIGHT[-1 - number // 8 % len(RIGHT)])
        right = dict(zip(places, rates, strict=False))
        texts = [f"{text:0{DIGITS}}" for text in generator.sample(range(10**DIGITS), PER_CLASS + WARMUP_PER_CLASS)]
        for j, text in enumerate(texts):
            used = key
            if j >= PER_CLASS:
                used = [
                    k if generator.random() < right.get(at, 1) else r
                    for at, (k, r) in enumerate(zip(key, rival, strict=True))
                ]
            answer = "".join(str((int(digit) + k) % 10) for digit, k in zip(text, used, strict=True))
            row = {"id": f"{name}{text}", "problem": f"{name}{text}=", "answer": answer, "class": name}
            (pool if j < PER_CLASS else warmup).append(row)
    return {"pool": pool, "warmup": warmup}


TASKS = {"sums": sums, "classes": classes}


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """One token a character, those that occur, and the end of a response."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(special_tokens=["<pad>", "<end>"], show_progress=False))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>", clean_up_tokenization_spaces=False
    )


def make_model(
    tokenizer: PreTrainedTokenizerFast, out: Path, seed: int, vocab: int = 0, positions: int = 64, hidden: int = 96
) -> None:
    """Writes a Qwen2 with random weights. `vocab`: rows of its embedding; 0: one a token."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=vocab or len(tokenizer),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=positions,
        initializer_range=0.05,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(out)
    tokenizer.save_pretrained(out)


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def write_task(out: Path, rows: Mapping[str, Sequence[Mapping]], tokenizer: PreTrainedTokenizerFast, **model) -> None:
    """Writes `rows`, by file, and a model (`make_model`) into a folder that appears when it is complete."""
    aside = out.with_name(f".{out.name}.unfinished")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for part, written in rows.items():
        lines = "".join(json.dumps(line) + "\n" for line in written)
        (aside / f"{part}.jsonl").write_text(lines, encoding="utf-8")
    disable_progress_bar()
    make_model(tokenizer, aside / "model", **model)
    aside.rename(out)
    print(f"{out}: written")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--task", choices=TASKS, default="sums")
    parser.add_argument("--teacher", action="store_true", help="of `sums`: right answers, a model of twice the width")
    options = parser.parse_args()
    if options.teacher and options.task != "sums":
        parser.error("--teacher: goes with --task sums")
    if options.out.exists():
        return print(f"{options.out}: already there")
    rows = sums(options.seed, right=True) if options.teacher else TASKS[options.task](options.seed)
    texts = [row["problem"] + row["answer"] for written in rows.values() for row in written]
    write_task(options.out, rows, train_tokenizer(texts), seed=options.seed, hidden=192 if options.teacher else 96)


if __name__ == "__main__":
    main()
