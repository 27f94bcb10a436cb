import pytest

from dynamo_megatron.reward.question_answering import qa_exact, qa_f1
from dynamo_megatron.types import Prompt


def prompt(answer):
    return Prompt("p", text="?", answer=answer)


# As the evaluation script of SQuAD 1.1 gives them.
@pytest.mark.parametrize(
    ("response", "answer", "exact", "f1"),
    [
        ("The Eiffel Tower!", "eiffel tower", 1.0, 1.0),
        ("in Paris, France", "Paris", 0.0, 0.5),
        ("the cat sat on a mat", "a cat on the mat", 0.0, 6 / 7),
        ("cat cat cat", "cat", 0.0, 0.5),
        ("Ph.D.", "phd", 1.0, 1.0),
        ("the", "a", 0.0, 0.0),  # the script: 1
        ("1492", 1492, 1.0, 1.0),
        ("O’Brien", "O'Brien", 1.0, 1.0),  # from here on the script: 0
        ("“Paris”…", "Paris", 1.0, 1.0),
        ("北京。", "北京", 1.0, 1.0),
        ("cafe\u0301", "café", 1.0, 1.0),
        ("10²", "102", 0.0, 0.0),
    ],
)
def test_values_of_squads_script(response, answer, exact, f1):
    assert qa_exact(prompt(answer), response) == exact
    assert qa_f1(prompt(answer), response) == pytest.approx(f1, abs=1e-12)


@pytest.mark.parametrize("reference", ["A", "The", "+", "..."])
def test_a_reference_of_an_article_or_signs_is_compared_as_it_is(reference):
    for reward in (qa_exact, qa_f1):
        assert reward(prompt(reference), f"<answer> {reference.upper()} </answer>") == 1.0
        assert [reward(prompt(reference), response) for response in ("", "-", "an", "Paris")] == [0.0] * 4
    assert qa_f1(prompt([reference, "Paris"]), "Paris") == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        ["New York City", "NYC"],
        {"text": ["New York City", "NYC"], "answer_start": [3, 3]},
        {"target": ["New York City", "NYC"]},
        {"value": "New York City", "aliases": ["NYC", "Big Apple"], "type": "WikipediaEntity"},
    ],
)
def test_the_best_of_several_references_counts(answer):
    assert qa_exact(prompt(answer), "nyc") == 1.0
    assert qa_f1(prompt(answer), "York") == 0.5
    assert qa_f1(prompt(answer), "Boston") == 0.0


@pytest.mark.parametrize(
    "response",
    [
        "<answer>Paris</answer> I am sure.",
        r"It is \boxed{Paris}, not Rome.",
        "Rome?\nNo. So the answer is: Paris.",
        "Let me think.\n\nParis\n\n",
        r"\boxed{Rome} <answer>Rome</answer> <answer>Paris</answer>",
        r"<answer>It is \boxed{\text{Paris}}</answer>",
        r"<think>\boxed{Rome} <answer>Rome</answer></think>Paris",
        r"\boxed{Rome}</think>It is \boxed{\mathrm{Paris}}.",
        "Answer：Paris",
        "所以答案是Paris。",
    ],
)
def test_the_answer_is_that_of_the_tag_the_box_or_the_last_line(response):
    assert qa_exact(prompt("Paris"), response) == 1.0


@pytest.mark.parametrize("answer", [None, [], "", {}, {"text": []}, [None], {"other": "x"}])
def test_a_row_without_a_reference_is_an_error(answer):
    with pytest.raises(ValueError, match="needs text, a number or a list of them"):
        qa_f1(prompt(answer), "x")
