"""Rows of the shapes that docs/data.md names are read with the keys it gives, and their answers are judged."""

import json

import pytest

from dynamo_megatron.config import DataConfig
from dynamo_megatron.data.sources import load_prompts
from dynamo_megatron.reward.math_answer import math_answer

MESSAGE = [{"role": "user", "content": "Solve it. The last line should be of the form Answer: $Answer.\n\n17+17?"}]
SHAPES = {  # name: (row, keys, an answer that is right, one that is not)
    "DAPO-Math-17k": (
        {
            "data_source": "math_dapo",
            "prompt": MESSAGE,
            "ability": "MATH",
            "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
        },
        {},
        "34",
        "35",
    ),
    "MATH": (
        {"problem": "1/2+1/4?", "level": "Level 1", "type": "Algebra", "solution": r"It is $\boxed{\frac{3}{4}}$."},
        {"answer_key": "solution"},
        r"\frac34",
        r"\frac12",
    ),
    "GSM8K": ({"question": "40+32?", "answer": "40+32 = <<40+32=72>>72\n#### 72"}, {}, "72", "40"),
    "NuminaMath-1.5": (
        {"problem": "x^2=4, x>0", "solution": "...", "answer": "2", "question_type": "math-word-problem"},
        {},
        "2",
        "-2",
    ),
    "DeepScaleR": ({"problem": "pi/2*2", "answer": r"\pi", "solution": ""}, {}, r"\pi", "3"),
    "Big-Math": ({"problem": "3*5", "answer": "15", "source": "orca", "llama8b_solve_rate": 0.5}, {}, "15", "8"),
    "AIME 2024": ({"id": 60, "problem": "...?", "answer": "073", "year": "2024"}, {}, "73", "74"),
    "AMC": ({"id": 0, "problem": "...?", "answer": 142.0, "url": "..."}, {}, "142", "141"),
    "Minerva": ({"question": "...?", "answer": r"4.5 \times 10^{33}"}, {}, r"4.5 \times 10^{33}", "4.5"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_row(name, tmp_path):
    row, keys, right, wrong = SHAPES[name]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    (prompt,) = load_prompts(DataConfig(source=str(file), **keys))
    assert math_answer(prompt, rf"So the answer is $\boxed{{{right}}}$.") == 1.0
    assert math_answer(prompt, rf"So the answer is $\boxed{{{wrong}}}$.") == 0.0


def test_dapo_s_repeated_rows_are_one_problem(tmp_path, caplog):
    row = SHAPES["DAPO-Math-17k"][0]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({**row, "extra_info": {"index": i}}) + "\n" for i in range(3)))
    (prompt,) = load_prompts(DataConfig(source=str(file)))
    assert "dropped 2 rows" in caplog.text
    assert math_answer(prompt, "Adding up.\n\nAnswer: 34") == 1.0
    assert math_answer(prompt, "Adding up.\n\nAnswer: 33") == 0.0
