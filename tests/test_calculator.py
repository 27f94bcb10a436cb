"""The calculator task: its agent, and what its small model reads and writes."""

import json
import random
import runpy
from pathlib import Path

import pytest

from dynamo_megatron.data.templates import load_tokenizer

ROOT = Path(__file__).parents[1]
AGENT = runpy.run_path(str(ROOT / "configs" / "calculator" / "agent.py"))
TASK = runpy.run_path(str(ROOT / "tools" / "calculator_task.py"))


@pytest.mark.parametrize(
    ("expression", "value"),
    [("37*24", "888"), ("1 + 2*3 - 4", "3"), ("2**9", "error"), ("f(1)", "error"), ("1.5*2", "error"), ("(", "error")],
)
def test_the_tool_computes_whole_numbers_alone(expression, value):
    assert AGENT["calculate"](json.dumps({"expression": expression})) == value


@pytest.mark.parametrize("arguments", ["{", "{}", "[]", '{"expression": 3}'])
def test_what_is_no_expression_is_an_error_and_no_exception(arguments):
    assert AGENT["calculate"](arguments) == "error"


def test_the_parts_have_no_problem_in_common():
    parts = TASK["problems"](0)
    assert len({pair for pairs in parts.values() for pair in pairs}) == 90 * 90


def test_warm_up_examples_are_what_the_template_makes_of_an_episode(tmp_path):
    TASK["make_model"](TASK["make_tokenizer"](), tmp_path, 0)
    tokenizer = load_tokenizer(tmp_path)
    asked = [{"role": "user", "content": "37*24"}]
    call = {"id": "1", "type": "function", "function": {"name": "calculator", "arguments": {"expression": "37*24"}}}
    answered = [*asked, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "888"}]
    for number, messages in enumerate((asked, answered)):
        example = TASK["example"](number, 37, 24, random.Random(0))
        assert example["problem"] == tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer.encode(example["problem"])
        assert tokenizer.decode(ids) == example["problem"] and len(ids) < 32
    assert len(tokenizer.encode(TASK["CALL"] % "37*24")) == 7
