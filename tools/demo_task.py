"""Writes the demo's task: problems, warm-up data that is partly wrong, a tokenizer of their text, a small Qwen2 model.

    python -P tools/demo_task.py OUT

Sums of two numbers of at most two digits. In the warm-up data an answer is wrong with a probability that depends on the
last digit of the first number, from 0 to 0.995: after it the model is good at some kinds of problem and bad at others,
as a pretrained model is, and rewards are what tells it which. OUT gets warmup.jsonl (prompt and completion), pool.jsonl
(what RL trains on), held_out.jsonl (in neither of them) and model/ (random weights). A second call finds OUT and does
nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config
from transformers.utils.logging import disable_progress_bar

WRONG = (0, 0.03, 0.1, 0.3, 0.6, 0.85, 0.95, 0.98, 0.99, 0.995)  # by the last digit of the first number
POOL, HELD_OUT, DRAWS = 512, 1024, 16  # problems; warm-up answers drawn for each of the other problems


def problems(seed: int) -> dict[str, list[tuple[int, int]]]:
    """All 10,000 pairs, in a seeded order, cut into the three parts."""
    pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(seed).shuffle(pairs)
    end = POOL + HELD_OUT
    return {"pool": pairs[:POOL], "held_out": pairs[POOL:end], "warmup": pairs[end:]}


def rows(part: str, pairs: list[tuple[int, int]], seed: int) -> list[dict[str, str]]:
    draws, generator = DRAWS if part == "warmup" else 1, random.Random(f"{part}/{seed}")
    out = []
    for draw in range(draws):
        for a, b in pairs:
            answer = a + b
            if part == "warmup" and generator.random() < WRONG[a % 10]:
                answer += generator.randint(1, 9)
            # an id a draw: the answers of one problem differ
            out.append(
                {"id": f"{a}+{b}/{draw}" if draws > 1 else f"{a}+{b}", "problem": f"{a}+{b}=", "answer": str(answer)}
            )
    return out


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """One token a character, those that occur, and the end of a response."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(special_tokens=["<pad>", "<end>"], show_progress=False))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>", clean_up_tokenization_spaces=False
    )


def make_model(tokenizer: PreTrainedTokenizerFast, out: Path, seed: int) -> None:
    torch.manual_seed(seed)
    config = Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        initializer_range=0.05,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.out.exists():
        print(f"{options.out}: already there")
        return
    aside = options.out.with_name(f".{options.out.name}.unfinished")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    disable_progress_bar()
    texts = []
    for part, pairs in problems(options.seed).items():
        written = rows(part, pairs, options.seed)
        lines = "".join(json.dumps(row) + "\n" for row in written)
        (aside / f"{part}.jsonl").write_text(lines, encoding="utf-8")
        texts += [row["problem"] + row["answer"] for row in written]
    make_model(train_tokenizer(texts), aside / "model", options.seed)
    aside.rename(options.out)
    print(f"{options.out}: written")


if __name__ == "__main__":
    main()
