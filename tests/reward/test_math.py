import pytest

from dynamo_megatron.reward.extraction import boxed, last_number, tagged
from dynamo_megatron.reward.math_answer import math_answer
from dynamo_megatron.types import Prompt


def score(answer, response):
    return math_answer(Prompt("p", text="?", answer=answer), response)


# (response, reference, right?): where in a response without a box the answer is
PLACES = [
    ("The answer is −5.", "5", 0),
    ("The answer is −5.", "-5", 1),
    ("答案是5。", "5", 1),
    ("I think 7 or 8. Final answer: **7**", "7", 1),
    ("Therefore she makes $18 every day at the farmers' market.", "18", 1),
    ("She makes 9 * 2 = $18 every day.", "18", 1),
    ("The answer is $\\frac{1}{2}$.", "1/2", 1),
    ("The answer is\n\\[ x = 5 \\]", "5", 1),
    ("The answer is even.", "even", 1),
    ("Hence it's even", "even", 0),
    ("The length is 12 cm.", "12 cm", 1),
    ("The length is 12 cm.", "12 m", 0),
    ("<think>a</think>\n\nThe answer is 5. <think>", "5", 0),
    ("Thus there are 10 ways, so the answer is 10 ways.", "10", 1),
    ("La respuesta es 4.", "4", 1),
    ("Ответ: 4", "4", 1),
    ("정답은 4입니다.", "4", 1),
    ("الجواب هو ٤", "4", 1),
    ("the answer is 1, 2", "2", 0),
    ("the answer is 1, 2", "1,2", 1),
    ("The area is 3π.", "3", 0),
    ("The area is 3π.", "3\\pi", 1),
    ("2√5", "5", 0),
    ("The answer is 2 1/4.", "2 1/4", 1),
    ("<answer>5</answer> I checked it 3 times.", "3", 0),
    ("<answer>The answer is 5</answer>", "5", 1),
    ("<|channel|>analysis<|message|>is it 4?<|end|><|start|>assistant<|channel|>final<|message|>It is 5.", "5", 1),
    ("<|channel|>analysis<|message|>is it 5?", "5", 0),
    ("#### 72", "72", 1),
    ("#### Step 1: 3\nthus 18", "18", 1),
    ("#### 10,000\n\nQuestion: 3", "10000", 1),
    ("Steps:\n- 5 apples", "5", 1),
    ("a total of 1,234 clips", "1234", 1),
    ("So we get $f(x)=x+1$.", "x+1", 1),
    ("The answer is 7 because 3+4=7.", "7", 1),
    ("So the answer is 7, not 8.", "7", 1),
    ("the answer is (C) 7", "7", 1),
    ("The answer is (C).", "\\text{(C)}", 1),
    ("answer: $9$ dollars", "9", 1),
    ("The probability is 50%.", "0.5", 1),
    ("so the sum is $1+2+3=6$", "6", 1),
    ("pays $18 for one and $20 for two", "20", 1),
    ("One is $5. Total: 18$.", "18", 1),
    ("The answer is 5\n\nLet me verify: 2+3=5, yes 100%.", "5", 1),
    ("so the length is 2√5 cm", "2\\sqrt5", 1),
]


def test_the_place_of_the_answer():
    otherwise = [row for row in PLACES if score(row[1], row[0]) != row[2]]
    assert not otherwise


# (reference, boxes that are right, boxes that are wrong)
BOXES = [
    ("\\{1,3\\} \\cup \\{2,4\\}", ["\\{1,2,3,4\\}", "\\{2,4\\}\\cup\\{1,3\\}"], ["\\{1,2,3\\}", "\\{1,2,3,5\\}"]),
    ("-\\frac{2(x^2+6)}{9(x^2-2)\\sqrt[3]{x^2-2}^2}", ["-\\frac{8x^2}{9(x^2-2)^{5/3}}+\\frac{2}{3(x^2-2)^{2/3}}"], []),
    (
        "f(x)=x+c",
        ["f(x) = x+c \\text{ for any } c", "f(x)=x+c \\quad \\forall x \\in \\mathbb{R}"],
        ["f(x)=x+c \\text{ for all } x > 0", "f(x)=x"],
    ),
    (
        "(-\\infty,-4)\\cup(-4,\\infty)",
        ["x\\ne -4", "\\mathbb{R}\\setminus\\{-4\\}", "x \\in (-4,\\infty)\\cup(-\\infty,-4)"],
        ["x\\ne 4", "\\mathbb{R}", "(-\\infty,-4]\\cup(-4,\\infty)", "x=-4"],
    ),
    (
        "\\frac{\\rho_1-\\rho_2}{\\rho_1 + \\rho_2} {g}_{k} + \\frac{\\gamma k^3}{\\rho_1 + \\rho_2}",
        ["\\frac{(\\rho_1-\\rho_2)g_k+\\gamma k^3}{\\rho_1+\\rho_2}"],
        [],
    ),
    ("[1,2]\\cup[2,3]", ["[1,3]", "1 \\le x \\le 3"], ["[1,3)", "(1,3)", "[1,2]"]),
    ("[0,1]", ["[0,1)\\cup\\{1\\}"], ["[0,1)"]),
    (
        "\\mathbb{R}",
        ["(-\\infty,\\infty)", "\\text{all real numbers}", "all real numbers", "x\\in\\mathbb{R}"],
        ["(0,\\infty)", "\\mathbb{Z}", "R"],
    ),
    ("-2", ["(-8)^{1/3}", "\\sqrt[3]{-8}"], ["2", "(8)^{1/3}"]),
    ("\\sqrt[3]{x-2}", ["(x-2)^{1/3}"], ["(x-2)^{1/2}", "(x+2)^{1/3}"]),
    ("x\\ne 1", ["(-\\infty,1)\\cup(1,\\infty)", "1 \\ne x", "x\\neq1"], ["x=1", "x\\ne2", "y\\ne 1"]),
    (
        "x<1 \\text{ or } x>2",
        ["(-\\infty,1)\\cup(2,\\infty)", "\\mathbb{R}\\setminus[1,2]", "x>2 \\text{ or } x<1"],
        ["(1,2)", "x<1"],
    ),
    ("A\\cup B", ["B\\cup A"], ["A\\cap B", "A"]),
    ("\\frac{9x}{2}", ["3\\frac32x"], []),
    ("\\frac{6}{x}", [], ["3\\frac32x"]),
    ("\\frac{15}{2}", ["3\\frac52"], []),
    ("\\frac72", ["2\\frac74"], []),
    ("1\\frac34", ["1\\frac3{4}", "1\\frac{3}4", "1.75", "7/4"], ["\\frac34"]),
    (
        "7",
        ["7 apples", "98 - 91", "\\text{(C) }7"],
        ["7\\text{ twelfths}", "7 sixteenths", "7 quadrillion", "7 \\text{ gross}", "x = 8 = 7", "7.1 \\approx 7"],
    ),
    ("Mgsin\\theta", [], ["mgsin\\theta"]),
    ("1073741823", ["2^{30}-1"], ["1.073741824 \\times 10^9"]),
    ("20000001", ["2.0000001\\times 10^7"], ["2.0\\times10^7"]),
    ("12345678", ["12345678.0"], ["12345678.9", "12345679.0+0"]),
    ("3", [], ["\\max(x,3)", "\\sqrt{9.1}"]),
    ("5-x", ["-x+5"], ["|x-5|", "\\sqrt{(x-5)^2}"]),
    ("0", ["0.0"], ["\\lfloor n/100\\rfloor", "\\binom{n}{50}"]),
    ("98", ["98"], []),
    ("99", [], ["98\\approx 99"]),
    ("(3,4)", ["x=3,y=4", "y=4,x=3"], ["y=3,x=4"]),
    ("y=2,x=1", ["(1,2)", "x=1, y=2"], ["(2,1)"]),
    ("(C) 7", ["C", "(C)", "7", "\\text{(C)} 7"], ["(D) 7", "D"]),
    ("C", ["C. 7", "\\text{(C) } 7", "(C) 7"], ["D. 7"]),
    ("12", ["12", "1200\\%"], ["12_5"]),
    ("204_5", ["204"], ["54", "204_6"]),
    ("\\frac{\\pi}{6}", ["30^\\circ", "30 \\text{ degrees}"], ["30"]),
    ("AB = 5", ["5", "AB=5"], ["6"]),
    ("1,234", ["1234"], ["1, 234", "234"]),
    ("x^{100}", ["x^{99}\\cdot x"], ["x^{101}"]),
    ("e^{x}-1", ["-1+e^x"], ["e^x"]),
    ("\\frac{x}{1+x^2}", ["x/(x^2+1)"], ["x/(1+x)"]),
    ("1/3", ["0.3333333", "\\frac13=0.33333333"], ["0.33333"]),
    ("2.5", ["5/2"], ["2.6"]),
    ("12 \\text{ cm}^2", ["A=3\\cdot4=12\\text{ cm}^2"], ["A=3\\cdot5=12\\text{ cm}^2"]),
    ("540", ["3\\cdot 180 = 540\\text{ meters}"], []),
    ("12 cm", ["P=2(2+4)=12\\text{ cm}"], []),
    ("60", ["\\angle A=180-120=60^\\circ"], []),
    ("\\$12", ["3\\times 4=\\$12"], []),
    (
        "5",
        ["d=\\sqrt{3^2+4^2}=5\\text{ units}", "5\\text{ units}"],
        ["5\\text{ wrong}", "5\\text{ tens}", "5\\text{M}", "5\\text{ doubled}"],
    ),
    ("(n,k)=(2,1)", ["n=2, k=1", "k=1,n=2", "(2,1)", "(n,k)=(2,1)"], ["n=1, k=2", "(1,2)"]),
    ("(m,a)=(5,3)", [], ["m=3,a=5"]),
    ("(1,2)", ["(x,y)=(1,2)"], ["(y,x)=(1,2)"]),
    ("(2,1)", ["n=2,k=1"], []),
    ("12", ["\\frac{12}{1} \\approx 12.0"], ["13 \\approx 12"]),
    ("13", [], ["\\frac{12}{1} \\approx 13"]),
    ("1000", [], ["\\sqrt2 \\approx 1\\times10^3"]),
    ("5", [], ["\\frac{10}{2.1}\\approx 1\\times 10^{400}", "5_{❶}"]),
    (
        "7",
        ["7 = x", "AB+CD=7", "f(2)=7", "a^2+b^2=7"],
        ["x = 7 \\pmod 8", "-x=7", "e^x=7", "\\ln x=7", "x!=7", "|x|=7", "x=8=y=7"],
    ),
    ("x=7 \\pmod 8", ["x = 7 \\pmod{8}"], ["x=7\\pmod 9"]),
    ("B", ["B", "(B) 13"], ["(B) or (C)", "\\text{(B)} or \\text{(C)}", "(B) (C) (D)", "B. not correct"]),
    ("(B) 12", ["B", "12"], ["(B) 13"]),
    ("20", ["20\\text{ points}"], ["20\\text{ point five}", "20\\text{ five}"]),
    ("5", [], ["\\displaystyle.5", "\\quad.5"]),
    ("1234567", ["1234567.0"], ["1234567.4\\cos 0"]),
    ("3:30 \\text{ p.m.}", ["\\text{3:30 PM}", "3:30 PM"], ["\\text{3:30 AM}"]),
    ("n^2", ["n^2 \\text{ for all } n"], ["n^2 \\text{ for any odd } n"]),
    ("70^\\circ", ["180-110=70^\\circ", "x = 70^\\circ"], ["180-100=70^\\circ"]),
]


def test_boxes():
    table = [(answer, box, right) for answer, *boxes in BOXES for right in (1.0, 0.0) for box in boxes[int(1 - right)]]
    assert [row for row in table if score(row[0], f"It is \\boxed{{{row[1]}}}.") != row[2]] == []


# Texts without a box in which 7 is not the answer
NOT_SEVEN = [
    "The answer is negative 7.",
    "The answer isn't 7.",
    "can't be 7",
    "any number but 7",
    "a multiple of 7",
    "It is not 7.",
    "5 more than 7",
    "2 raised to 7",
    "10 to the power of 7",
    "3 mod 7",
    "between 6 and 7",
    "7 factorial",
    "7 tenths",
    "1 over 7",
    "$3$ or maybe $7$",
    "8 or possibly 7",
    "Either $6$ or $7$.",
    "答案不是7。",
    "正确答案是8,不是7",
    "答案是8而不是7",
    "$x$ plus $7$",
    "The answer is half of 7.",
    "the answer is no more than $7$",
    "So \\boxed{6} or \\boxed{7}",
    "$x=-\\boxed{7}$",
    "The answer is twice 7",
    "3\\boxed{7}",
    "\\boxed{7}^2",
    "\\boxed{7}00",
    "\\boxed{7}.5",
    "1/\\boxed{7}",
    "It is not \\boxed{7}.",
    "x = 7 is not a solution",
    "We reject 7",
    "x > 7",
]


def test_a_number_that_words_change_or_doubt_is_no_answer():
    assert [text for text in NOT_SEVEN if score(7, text)] == []


# Each took long or raised once.
DEGENERATE = [
    "####" + "1" * 30_000 + " x",
    r"\frac(A)1e999999",
    r"1.5e5\overline{3}",
    "9^{9^{9^{9}}}",
    "((9!)!)!",
    "{" * 5000 + "3" + "}" * 5000,
    "," * 100_000,
    r"\frac{10}{2.1} \approx 1 \times 10^{400}",
]


@pytest.mark.parametrize("box", DEGENERATE, ids=[box[:12] for box in DEGENERATE])
def test_degenerate_answers_are_wrong(box):
    assert score(7, rf"\boxed{{{box}}}") == score(7, box) == 0.0


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
    score(72, unit * (200_000 // len(unit)))
    tagged(unit * (200_000 // len(unit)))
