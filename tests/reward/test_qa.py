import pytest

from dynamo_megatron.reward.question_answering import choice_answer, chosen, qa_exact, qa_f1, qa_sources
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
        ("5", 5.0, 1.0, 1.0),
        ("5", [7.5, 5.0], 1.0, 1.0),
        ("nan", [float("nan"), "5"], 0.0, 0.0),
        ("O’Brien", "O'Brien", 1.0, 1.0),  # from here on the script: 0
        ("“Paris”…", "Paris", 1.0, 1.0),
        ("北京。", "北京", 1.0, 1.0),
        ("cafe\u0301", "café", 1.0, 1.0),
        ("10²", "102", 0.0, 0.0),
        ("The answer is", "the answer is", 0.0, 0.0),
    ],
)
def test_values_of_squads_script(response, answer, exact, f1):
    assert qa_exact(prompt(answer), response) == exact
    assert qa_f1(prompt(answer), response) == pytest.approx(f1, abs=1e-12)


@pytest.mark.parametrize("reference", ["The", "+"])
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
        "所以答案是Paris。",
        "Paris, that is the answer.",
    ],
)
def test_the_answer_is_that_of_the_tag_the_box_or_the_last_line(response):
    assert qa_exact(prompt("Paris"), response) == 1.0


@pytest.mark.parametrize(
    ("response", "sources", "value"),
    [
        ("<answer>Paris</answer> [3, 1], as [3] says", ["1", 3], 1.0),
        ("Paris [1]", [1, 3], 2 / 3),
        ("Paris [1][2][3][4]", [2], 2 / 5),
        ("Paris", [1], 0.0),
        ("Paris", [], 1.0),
        ("Paris [1]", [], 0.0),
        ("[ Annual Report ]", ["annual report"], 1.0),
        ("<think>[2]</think> [1]", [1], 1.0),
        ("<think>[1]", [], 0.0),
        (" ", [], 0.0),
    ],
)
def test_cited_sources(response, sources, value):
    assert qa_sources(Prompt("p", text="?", meta={"sources": sources}), response) == pytest.approx(value)


@pytest.mark.parametrize("meta", [{}, {"sources": 3}, {"sources": "1"}, {"sources": [1.5]}])
def test_a_row_without_sources_is_an_error(meta):
    with pytest.raises(ValueError, match="needs the column sources, a list such as"):
        qa_sources(Prompt("p", text="?", meta=meta), "[1]")


@pytest.mark.parametrize("answer", [None, [], "", {}, {"text": []}, [None], {"other": "x"}])
def test_a_row_without_a_reference_is_an_error(answer):
    with pytest.raises(ValueError, match="needs text, a number or a list of them"):
        qa_f1(prompt(answer), "x")


# The letter of a choice


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
        (r"$\boxed{P(A)}$, so the answer is (C).", "C"),
        (r"Is the answer A? The answer is B. No: \boxed{C}", "C"),
        (r"The answer is $\boxed{\mathbf{B}}$", "B"),
        (r"\boxed{\text{B. } E = mc^2}", "B"),
        (r"<think>\boxed{A}, the answer is A</think>The answer is B", "B"),
        (r"<think>The answer is A. \boxed{A}", None),
        ("所以答案是（B）。", "B"),
        ("所以选B项。", "B"),
        ("The answer is A due to the lack of vitamin C.", "A"),
        ("The answer is A? No.\n\n**Final Answer:**\n\nC", "C"),
        ("The correct answer is option C, not A.", "C"),
        ("**Answer:** D", "D"),
        ("The answer is not A. I would say C", "C"),
        ("The answer is A. But wait, B fails.\nThe answer is C because B is odd.", "C"),
        ("The answer is A or B", None),
        ("Both B and D look right, I think it must be D", "D"),
        ("I'd say it depends. A dog is a B", "B"),
        ("Option A is right", "A"),
        ("Vitamin B12", None),
        ("No doubt:\n**C) X-ray**", "C"),
        ("A) is tempting but wrong.\nSo D", "D"),
        ("(C) Hepatitis B", "C"),
        ("(A) fails because the sign is wrong. Therefore (D).", "D"),
        ("D. Vitamin C is not made by humans, so A is out", "D"),
        ("If I choose A, the sum is 3; with B it is 4. So B", "B"),
        ("Answer: B\nI choose this because A and C are wrong.", "B"),
        ("J. S. Bach composed it, so C", "C"),
        ("I'd choose C, since A and B are wrong", "C"),
        ("(a) is false. (b) is true.\nAnswer: (b)", "B"),
        ("a) 3 is too small.\nb) 4 fits.\nSo the correct one is b.", None),
        ("选项A错误,选项 C 不对。故选B。", "B"),
        ("A 错误。因此答案是选项B。", "B"),
        ("因此选B，不选A。", "B"),
        ("综上，正确选项是B。A 错误", "B"),
        ("One might think the answer is A. However, the correct answer is C.", "C"),
        ("The answer is B? No, the answer is C.", "C"),
        ("Option B is the correct answer because options A, C and D are wrong.", "B"),
        ("**B** is the correct answer. A is wrong. D too.", "B"),
        ("Thus option (B) is correct, while (A), (C) and (D) are incorrect.", "B"),
        ("If B is the correct answer, x is 2. It is 3, so the answer is C.", "C"),
        ("The answer is B. The other tempting option is C.", "B"),
        ("The answer is B, even though a common wrong answer is A.", "B"),
        ("The correct answer is B. This answer is consistent with Hypothesis A.", "B"),
        ("故选B，不应选A。", "B"),
        ("Which of A, B, C or D is the correct answer? The force doubles, so it must be B.", "B"),
        ("Neither A nor B is the correct answer, hence C.", "C"),
        ("Option A is correct at first sight.\n\nHence (D).", "D"),
        ("\\boxed{C}\nOption A is correct only for n = 1.", "C"),
        ("The answer is C. I checked whether option B is correct.", "C"),
        ("Option A is correct about x, but the answer is D.", "D"),
    ],
)
def test_the_letter_that_a_response_chooses(response, letter):
    assert chosen(response) == letter


@pytest.mark.parametrize("answer", ["b", " (B) ", "B.", 1])
def test_forms_of_the_right_letter(answer):
    responses = ("The answer is B", "The answer is C", "No idea")
    assert [choice_answer(prompt(answer), response) for response in responses] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("answer", [None, "Paris", "", "1", -1, 26, True, 1.0, ["A"]])
def test_a_row_without_a_letter_is_an_error(answer):
    with pytest.raises(ValueError, match="needs a letter"):
        choice_answer(prompt(answer), "A")


@pytest.mark.parametrize("part", ["A, ", "answer is ", "(((", "answer: * ", " , ", "A or ", "I pick (", "E. coli so "])
def test_a_long_response_takes_no_time(part):
    chosen(part * (1_000_000 // len(part)))
    chosen(f"\\boxed{{{part * (1_000_000 // len(part))}}}")
