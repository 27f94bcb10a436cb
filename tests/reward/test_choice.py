import pytest

from dynamo_megatron.reward.question_answering import choice_answer, chosen
from dynamo_megatron.types import Prompt


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("<answer>B</answer>", "B"),
        ("<answer>(c) because A is wrong</answer>", "A"),  # a small letter counts by itself alone
        ("<answer>c</answer>", "C"),
        (r"so \boxed{\text{D}}", "D"),
        (r"\boxed{(B)} or maybe C", "B"),
        (r"\boxed{B. A small dog}", "B"),
        (r"\boxed{A, B}", None),
        (r"\boxed{A and B}", None),
        (r"\boxed{A/B}", None),
        (r"\boxed{12}", None),
        (r"The energy is $\boxed{\langle H\rangle \ll \Delta E}$. **Answer: D**", "D"),
        (r"**Answer: D**, since $\boxed{E = mc^2}$", "D"),
        (r"$\boxed{P(A)}$, so the answer is (C).", "C"),
        (r"\boxed{H}. So the answer is D.", "D"),
        (r"Is the answer A? The answer is B. No: \boxed{C}", "C"),
        (r"The answer is $\boxed{\mathbf{B}}$", "B"),
        (r"\boxed{\textbf{(C)}\ \frac{1}{2}}", "C"),
        (r"\boxed{\text{B. } E = mc^2}", "B"),
        (r"<think>\boxed{A}, the answer is A</think>The answer is B", "B"),
        (r"I guess \boxed{A}</think>\boxed{B}", "B"),
        (r"<think>The answer is A. \boxed{A}", None),
        ("所以答案是（B）。", "B"),
        ("The answer is (B).", "B"),
        ("The correct answer is option C, not A.", "C"),
        ("**Answer:** D", "D"),
        ("The answer is not A. I would say C", "C"),
        ("The answer is A. But wait, B fails.\nThe answer is C because B is odd.", "C"),
        ("The answer is A or B", None),
        ("Both B and D look right, I think it must be D", "D"),
        ("B", "B"),
        ("I'd say it depends. A dog is a B", "B"),
        ("Option A is right", "A"),
        ("no letter at all", None),
        ("Vitamin B12", None),
    ],
)
def test_the_letter_that_a_response_chooses(response, letter):
    assert chosen(response) == letter


@pytest.mark.parametrize("answer", ["B", "b", " (B) ", "B.", 1])
def test_forms_of_the_right_letter(answer):
    prompt = Prompt("p", text="?", answer=answer)
    assert choice_answer(prompt, "The answer is B") == 1.0
    assert choice_answer(prompt, "The answer is C") == 0.0
    assert choice_answer(prompt, "No idea") == 0.0


@pytest.mark.parametrize("answer", [None, "Paris", "", "1", -1, 26, True, 1.0, ["A"]])
def test_a_row_without_a_letter_is_an_error(answer):
    with pytest.raises(ValueError, match="needs a letter"):
        choice_answer(Prompt("p", text="?", answer=answer), "A")


@pytest.mark.parametrize("part", ["A, ", "answer is ", "(((", "answer: * ", " , ", "A or "])
def test_a_long_response_takes_no_time(part):
    chosen(part * (1_000_000 // len(part)))
    chosen(f"\\boxed{{{part * (1_000_000 // len(part))}}}")
