import time

import pytest

from dynamo_megatron.reward.extraction import boxed, last_number, tagged
from dynamo_megatron.reward.math_answer import math_answer
from dynamo_megatron.types import Prompt


def score(answer, response):
    return math_answer(Prompt("p", text="?", answer=answer), response)


# (answer, responses that are right, responses that are wrong)
TABLE = [
    (
        "72",
        [r"\boxed{72}", "The answer is 72.", "#### 72", "so 72.0", r"$x = 72$", "**72**"],
        [r"\boxed{73}", "7 2", ""],
    ),
    (72, [r"first \boxed{71}, no: \boxed{72}", "72"], [r"\boxed{72} or \boxed{71}", "the answer"]),
    (0.5, [r"\boxed{\frac{1}{2}}", "it is 1/2", r"\boxed{50\%}", ".5"], [r"\boxed{5}", "2/1"]),
    (-3.0, [r"\boxed{-3}", "x = -3"], [r"\boxed{3}", "x = 3"]),
    (7, ["007", r"\boxed{\,7}", "7.0"], ["-7", "70", "-0"]),
    ("...\n#### 1,234", [r"\boxed{1234}", "1,234 clips", "$1,234", r"\boxed{\$1{,}234}"], [r"\boxed{1.234}", "1,235"]),
    (
        10000,
        [r"\boxed{10,000}", r"\boxed{10\,000}", r"\boxed{x=10,000}", "#### 10,000\n\nQuestion: 3"],
        [r"\boxed{10}", "10,00"],
    ),
    (r"\frac{14}{3}", [r"\boxed{\dfrac{14}{3}}", r"\boxed{14/3}", r"So \(\frac{14}{3}\)."], [r"\boxed{4.67}"]),
    (r"\left( 3, \frac{\pi}{2} \right)", [r"\boxed{(3, \pi/2)}"], [r"\boxed{(\pi/2, 3)}", r"\boxed{3}"]),
    ("p - q", [r"\boxed{p-q}", r"\boxed{-q + p}", "It is $p - q$."], [r"\boxed{q-p}"]),
    (r"\sqrt{8}", [r"\boxed{2\sqrt2}"], [r"\boxed{8}"]),
    ("x^2-1", [r"\boxed{(x-1)(x+1)}"], [r"\boxed{x^2+1}"]),
    ("1, 2, 3", [r"\boxed{3,2,1}"], [r"\boxed{1,2}", r"\boxed{3}"]),
    (
        r"\text{Evelyn}",
        [r"\boxed{Evelyn}", r"\boxed{\text{evelyn}}", "The answer is Evelyn."],
        [r"\boxed{Evelny}", "Eve"],
    ),
    ("even", [r"\boxed{\text{Even}}", "2 and 4, so:\nAnswer: **even**"], [r"\boxed{neve}", r"\boxed{odd}"]),
    (r"\text{(C)}", [r"\boxed{C}", r"\boxed{(C)}"], [r"\boxed{D}"]),
    (r"90^\circ", [r"\boxed{90}"], [r"\boxed{9}"]),
    (
        18,
        ["One is $5. Total: 18$.", "pays $18 for one and $20 for two, so $18", "#### Step 1: 3\nthus 18"],
        ["pays $18 for one and $20 for two"],
    ),
    (5, [r"\boxed{\boxed{5}}", r"\boxed{5} then \boxed{6"], [r"\boxed{", r"\boxed{}", r"\boxed{x}"]),
    ("1e-05", [r"\boxed{1e-05}"], [r"\boxed{1}"]),
    ("4.5e33", ["about 4.5e33", r"\boxed{4.50 \times 10^{33}}"], ["4.5", r"\boxed{4.5e32}"]),
    ("N=n", [r"\boxed{N = n}"], [r"\boxed{N=n+1}"]),
    ("y=2x", [r"\boxed{y = x + x}"], [r"\boxed{y=3x}"]),
    (1e-05, [r"\boxed{0.00001}"], [r"\boxed{0.0001}"]),
]


@pytest.mark.parametrize(("answer", "right", "wrong"), TABLE, ids=[repr(row[0]) for row in TABLE])
def test_answers(answer, right, wrong):
    assert {r: score(answer, r) for r in right} == dict.fromkeys(right, 1.0)
    assert {r: score(answer, r) for r in wrong} == dict.fromkeys(wrong, 0.0)


# (response, reference, right?): where in a response without a box the answer is
PLACES = [
    ("The answer is −5.", "5", 0),
    ("The answer is −5.", "-5", 1),
    ("答案是5。", "5", 1),
    ("答えは5です", "5", 1),
    ("I think 7 or 8. Final answer: **7**", "7", 1),
    ("Therefore she makes $18 every day at the farmers' market.", "18", 1),
    ("She makes 9 * 2 = $18 every day.", "18", 1),
    ("The final answer is 3. I hope it is correct.", "3", 1),
    ("The answer is $\\frac{1}{2}$.", "1/2", 1),
    ("The answer is\n\\[ x = 5 \\]", "5", 1),
    ("**Answer:** 5", "5", 1),
    ("Answer\n5", "5", 1),
    ("The answer is even.", "even", 1),
    ("Hence it's even", "even", 0),
    ("The length is 12 cm.", "12 cm", 1),
    ("The length is 12 cm.", "12 m", 0),
    ("### Final Answer\n\n42", "42", 1),
    ("<think>a</think>\n\nThe answer is 5. <think>", "5", 0),
    ("Thus there are 10 ways, so the answer is 10 ways.", "10", 1),
    ("La respuesta es 4.", "4", 1),
    ("Die Antwort ist 4.", "4", 1),
    ("La réponse est 4.", "4", 1),
    ("Ответ: 4", "4", 1),
    ("정답은 4입니다.", "4", 1),
    ("الجواب هو ٤", "4", 1),
    ("A resposta é 4", "4", 1),
    ("the answer is 1, 2", "2", 0),
    ("the answer is 1, 2", "1,2", 1),
    ("The area is 3π.", "3", 0),
    ("The area is 3π.", "3\\pi", 1),
    ("So the value is 4².", "16", 1),
    ("2√5", "5", 0),
    ("The answer is 2 1/4.", "2 1/4", 1),
    ("<answer>5</answer> I checked it 3 times.", "3", 0),
    ("<answer>The answer is 5</answer>", "5", 1),
    ("<answer> 5 apples </answer>", "5", 1),
    ("<|channel|>analysis<|message|>is it 4?<|end|><|start|>assistant<|channel|>final<|message|>It is 5.", "5", 1),
    ("<|channel|>analysis<|message|>is it 5?", "5", 0),
    ("#### 72", "72", 1),
    ("**72**", "72", 1),
    ("#### Step 1: 3\nthus 18", "18", 1),
    ("#### 10,000\n\nQuestion: 3", "10000", 1),
    ("It is -3", "-3", 1),
    ("Steps:\n- 5 apples", "5", 1),
    ("I need 3 + 8 = 11", "11", 1),
    ("a total of 1,234 clips", "1234", 1),
    ("The result is x+1", "x+1", 1),
    ("So we get $f(x)=x+1$.", "x+1", 1),
    ("The answer is 7 because 3+4=7.", "7", 1),
    ("So the answer is 7, not 8.", "7", 1),
    ("the answer is (C) 7", "7", 1),
    ("The answer is (C).", "\\text{(C)}", 1),
    ("The answer is C", "C", 1),
    ("The answer should be 9", "9", 1),
    ("Answer = 9", "9", 1),
    ("answer: $9$ dollars", "9", 1),
    ("The probability is 50%.", "0.5", 1),
    ("so the sum is $1+2+3=6$", "6", 1),
    ("Answer:\n\n$$8$$", "8", 1),
    ("So, 2^3 = 8", "8", 1),
    ("pays $18 for one and $20 for two", "20", 1),
    ("One is $5. Total: 18$.", "18", 1),
    ("The answer is 5\n\nLet me verify: 2+3=5, yes 100%.", "5", 1),
    ("答案：5", "5", 1),
    ("P = 3/4", "3/4", 1),
    ("Answer: \\(5\\)", "5", 1),
    ("so the length is 2√5 cm", "2\\sqrt5", 1),
]


def test_the_place_of_the_answer():
    otherwise = [row for row in PLACES if score(row[1], row[0]) != row[2]]
    assert not otherwise


@pytest.mark.parametrize("answer", [None, "", "  ", [1], {"a": 1}])
def test_an_answer_that_cannot_be_checked_is_an_error(answer):
    with pytest.raises(ValueError, match="math reward needs an answer"):
        score(answer, "1")


def test_extraction():
    assert boxed(r"a \boxed{\frac{1}{2}} b") == r"\frac{1}{2}" and boxed(r"\boxed{\{1\}}") == r"\{1\}"
    assert boxed("no") is None and boxed(r"\boxed{1") is None
    assert boxed(r"\boxed{1} or \fbox{2}") == "1" and boxed(r"so \fbox{2}") == "2"
    assert boxed(r"\boxed{7}. \boxed{}") == "7" and boxed(r"\boxed 2.") == "2"
    assert boxed(r"$\boxed\frac12$") == r"\frac12" and boxed(r"\boxed{\frac{1}{2}") is None
    assert tagged("<answer>1</answer> <answer> 2\n</answer>") == "2" and tagged("</answer><answer>") is None
    assert last_number("3-5") == "5" and last_number("a -5.") == "-5" and last_number("1,234,567 x2") == "1234567"
    assert boxed(r"\boxed{\boxed{5} cm}") == "5" and boxed(r"} \boxed{1} {") == "1"
    assert boxed(r"\boxed{a\}b}") == r"a\}b"
    assert last_number("-1,234.5/6") == "-1234.5/6" and last_number("-.5") == "-.5" and last_number("-1,2") == "2"
    assert last_number("12,34") == "34" and last_number("v2") is None and last_number("to 1.5e-3.") == "1.5e-3"


@pytest.mark.parametrize(
    "unit", [r"\boxed{", r"\(", r"\[ x", "$", "$$ 1 ", "1,111,", "#### ", "{", "<answer>", ",\\!000"]
)
def test_a_response_that_repeats_itself_costs_no_time(unit):
    start = time.process_time()
    score(72, unit * (100_000 // len(unit)))
    tagged(unit * (100_000 // len(unit)))
    assert time.process_time() - start < 2.0
