from types import SimpleNamespace

import pytest

from dynamo_megatron.config import DataConfig
from dynamo_megatron.data.sources import load_prompts
from dynamo_megatron.reward import procedural
from dynamo_megatron.reward.procedural import extract_answer, reasoning_gym_answer
from dynamo_megatron.types import Prompt


def first(spec):
    return load_prompts(DataConfig(source=f"reasoning_gym:{spec}"))[0]


def test_prime_factorization_where_the_library_raises_or_pays_for_nothing():
    prompt = first("prime_factorization?size=1&seed=42&min_value=12&max_value=12")
    assert reasoning_gym_answer(prompt, "<answer>2 × 2 × 3</answer>") == 1.0
    assert reasoning_gym_answer(prompt, r"thus \boxed{3 × 2 × 2}") == 1.0
    assert reasoning_gym_answer(prompt, "2 × 2 × 3\n") == 1.0
    assert reasoning_gym_answer(prompt, "<answer>4 × 3</answer>") == 0.5
    for worthless in ("banana", "", "<answer>5</answer>", "<answer>2 × × y</answer>"):
        assert reasoning_gym_answer(prompt, worthless) == 0.0


@pytest.mark.parametrize("name", ["gsm_symbolic", "countdown", "power_function", "rush_hour", "arc_agi", "chain_sum"])
@pytest.mark.parametrize("response", ["banana", "<answer></answer>", "<answer>?</answer>", ""])
def test_nonsense_earns_nothing(name, response):
    assert reasoning_gym_answer(first(f"{name}?size=1"), response) == 0.0


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("string_insertion", "oracle_answer"),
        ("n_queens", "[row.split() for row in valid_solutions[0].split(chr(10))]"),
        ("puzzle24", "8*3*1*1"),
        ("number_sorting", "['nan', 'nan', 'nan']"),
        ("complex_arithmetic", "1+nani"),
        ("rubiks_cube", "F999999999"),
        ("rush_hour", "None"),
        ("complex_arithmetic", "nan"),
        ("coin_flip", "0"),
        ("game_of_life_halting", "maybe"),
    ],
)
def test_what_a_scorer_would_evaluate_or_pay_for_blindly_earns_nothing(name, answer):
    assert reasoning_gym_answer(first(f"{name}?size=1&seed=7"), f"<answer>{answer}</answer>") == 0.0


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("simple_integration", ["exec(chr(49))", r"exp('\157')", "x # 1", "x._y", "ﬁ", "__x", "S[1]"]),
        ("countdown", ["pi/pi", "2**3", "7//2", "2.3*5", "E-E", "1 # 2"]),
    ],
)
def test_what_sympy_would_evaluate_is_not_shown_to_it(monkeypatch, name, answers):
    prompt, seen = first(f"{name}?size=1&seed=7"), []
    scorer = SimpleNamespace(score_answer=lambda answer, entry: seen.append(answer) or 0.0)
    monkeypatch.setattr(procedural, "_dataset", lambda name, options: scorer)
    for answer in [*answers, "2 + 3"]:
        reasoning_gym_answer(prompt, f"<answer>{answer}</answer>")
    assert seen == ["2 + 3"]


def test_formulas_are_still_read():
    prompt = first("simple_integration?size=1&seed=7")
    assert reasoning_gym_answer(prompt, f"<answer>0 + {prompt.answer}</answer>") == 1.0
    prompt = first("coin_flip?size=1&seed=7")
    assert reasoning_gym_answer(prompt, f"<answer>0{prompt.answer}</answer>") == 1.0


@pytest.mark.parametrize("name", ["gsm_symbolic", "countdown", "arc_agi", "time_intervals", "sentence_reordering"])
def test_the_datasets_own_answer_earns_all(name):
    prompt = first(f"{name}?size=1")
    assert reasoning_gym_answer(prompt, f"I think so.\n<answer>{prompt.answer}</answer>") == 1.0


def test_extraction_looks_at_the_form_of_the_answer():
    assert extract_answer("12 + 5 = 17, so 1,700 it is.", "3") == "1700"
    assert extract_answer("Spruce\nbecause 5 > 3", "Oak") == "Spruce"
    assert extract_answer("1 2\n3 4", "4 3\n2 1") == "1 2\n3 4"
    assert extract_answer("no number", "3") == ""
    assert extract_answer("<think>\\boxed{b}</think>\n\na", "c") == "a"
    assert extract_answer(r"<think>\boxed{b}", "c") == ""


def test_another_source_is_an_error():
    with pytest.raises(ValueError, match="needs prompts of a reasoning_gym: source"):
        reasoning_gym_answer(Prompt("p", text="?", answer="1"), "1")
