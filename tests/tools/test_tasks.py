"""The task of configs/calculator: what a small model reads and writes."""

import random
import runpy
from pathlib import Path

from dynamo_megatron.data.templates import load_tokenizer

ROOT = Path(__file__).parents[2]
SUMS = runpy.run_path(str(ROOT / "tools" / "calculator_task.py"))


def test_warm_up_examples_are_what_the_template_makes_of_an_episode(tmp_path):
    SUMS["make_tokenizer"]().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    asked = [{"role": "user", "content": "37*24"}]
    call = {"id": "1", "type": "function", "function": {"name": "calculator", "arguments": {"expression": "37*24"}}}
    answered = [*asked, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "888"}]
    for number, messages in enumerate((asked, answered)):
        example = SUMS["example"](number, 37, 24, random.Random(0))
        assert example["problem"] == tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert tokenizer.decode(tokenizer.encode(example["problem"])) == example["problem"]
