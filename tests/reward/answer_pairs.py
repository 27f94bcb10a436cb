r"""Answers written in two ways, made from rules: (rule, reference, what stands in a response's \boxed{}, equal?).

Both are what data sets and models write. `equal` is what a teacher would say of the two, with what docs/rewards.md
promises of percentages and units. `EXCEPTIONS` in test_answer_pairs.py has those that the reward judges otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import permutations

Pair = tuple[str, str, str, bool]


def pairs() -> list[Pair]:
    rules = (
        *(fractions, mixed_numbers, decimals, thousands, scientific, money, percent, degrees, units, roots),
        *(powers, pi, polynomials, functions, complex_numbers, equations, inequalities, tuples, sets, lists),
        *(intervals, matrices, text, choices, wrappers, bases, combinatorics, several),
    )
    return [(rule.__name__, *pair) for rule in rules for pair in rule()]


def fractions() -> Iterator[tuple[str, str, bool]]:
    for a, b in ((1, 2), (3, 4), (7, 8), (5, 16), (11, 20), (9, 25), (13, 40), (121, 50)):
        latex = rf"\frac{{{a}}}{{{b}}}"
        decimal = format(float(Fraction(a, b)), "g")
        for other in (rf"\dfrac{{{a}}}{{{b}}}", f"{a}/{b}", decimal, rf"\frac{{{3 * a}}}{{{3 * b}}}"):
            yield latex, other, True
        yield f"-{latex}", rf"\frac{{-{a}}}{{{b}}}", True
        yield decimal, rf"\tfrac{{{a}}}{{{b}}}", True
        yield latex, rf"\frac{{{b}}}{{{a}}}", False
        yield latex, f"-{a}/{b}", False
        yield latex, rf"\frac{{{a}}}{{{b + 1}}}", False
    for a, b in ((1, 2), (3, 4), (5, 9), (4, 7)):
        yield rf"\frac{a}{b}", rf"\frac{{{a}}}{{{b}}}", True
        yield rf"\frac{{{a}}}{{{b}}}", rf"\frac {a}{b}", True
    for a, b in ((1, 3), (2, 7), (5, 6)):  # not worked out to the end
        yield rf"\frac{{{a}}}{{{b}}}", f"{a / b:.2f}", False
    yield r"\frac{1}{3}", r"1 \div 3", True


def mixed_numbers() -> Iterator[tuple[str, str, bool]]:
    for whole, a, b in ((1, 1, 2), (2, 3, 4), (137, 1, 2), (3, 2, 5)):
        improper = rf"\frac{{{whole * b + a}}}{{{b}}}"
        yield rf"{whole}\frac{{{a}}}{{{b}}}", improper, True
        yield improper, rf"{whole} \frac{a}{b}", True
        yield rf"{whole}\frac{{{a}}}{{{b}}}", rf"\frac{{{whole * a}}}{{{b}}}", False


def decimals() -> Iterator[tuple[str, str, bool]]:
    for plain in ("7", "18", "0.5", "3.25", "12.6"):
        zeros = f"{plain}00" if "." in plain else f"{plain}.00"
        yield plain, zeros, True
        yield zeros, plain, True
        yield plain, f"+{plain}", True
        yield plain, f"-{plain}", False
    yield "0.35625", ".35625", True
    yield ".5", "0.5", True
    yield "7", "007", True
    yield "3.0", "3.", True
    for near in ("0.35624", "0.3562", "0.356250001", "35625"):
        yield "0.35625", near, near == "0.356250001"  # within 5e-7
    yield "2.718", "2.719", False
    yield "0.00012", "0.00013", False


def thousands() -> Iterator[tuple[str, str, bool]]:
    for number in (1234, 58500, 10080, 1000000, 32348, 11111111100):
        joined, commas = str(number), f"{number:,}"
        for separator in (",", "{,}", r"\,", r",\!"):
            yield joined, commas.replace(",", separator), True
        yield commas, joined, True
        yield commas.replace(",", "{,}"), commas, True
        yield joined, str(number + 1), False
        yield joined, commas.replace(",", "."), False


def scientific() -> Iterator[tuple[str, str, bool]]:
    for digits, exponent in (("4.5", 33), ("1.24", -8), ("3.61", 2), ("1.325", -27), ("7", 37), ("6.5", -2)):
        short, times = f"{digits}e{exponent}", rf"{digits} \times 10^{{{exponent}}}"
        yield short, times, True
        yield times, rf"{digits}\cdot 10^{{{exponent}}}", True
        yield short, f"{digits}E{exponent}", True
        yield short, rf"{digits} \times 10^{{{exponent + 1}}}", False
        yield short, f"{digits}1e{exponent}" if "." in digits else f"{digits}.1e{exponent}", False
    yield "4500", r"4.5 \times 10^3", True
    yield "0.0000672", r"6.72 \times 10^{-5}", True
    yield "1000000", "10^6", True
    yield "2e27", r"2 \times 10^{27}", True
    yield "10^{100}", "10^{99}", False


def money() -> Iterator[tuple[str, str, bool]]:
    for amount in ("36", "18.90", "32348", "5.4"):
        yield amount, rf"\${amount}", True
        yield rf"\${amount}", amount, True
        yield rf"\${amount}", rf"{amount} \text{{ dollars}}", True
        yield rf"\${amount}", rf"\$1{amount}", False


def percent() -> Iterator[tuple[str, str, bool]]:
    for number in ("50", "17.5", "8", "62.5"):
        share = Fraction(number) / 100
        yield rf"{number}\%", number, True  # docs/rewards.md: the sign may be left out
        yield number, rf"{number} \%", True
        yield rf"{number}\%", rf"\frac{{{share.numerator}}}{{{share.denominator}}}", True
        yield rf"{number}\%", format(float(share), "g"), True
        yield rf"{number}\%", rf"{number}1\%", False


def degrees() -> Iterator[tuple[str, str, bool]]:
    for number in ("30", "90", "145", "18.8"):
        yield rf"{number}^\circ", rf"{number}^{{\circ}}", True
        yield rf"{number}^{{\circ}}", number, True
        yield number, rf"{number}^\circ", True
        yield rf"{number}^\circ", rf"{number} \text{{ degrees}}", True
        yield rf"{number}^\circ", rf"1{number}^\circ", False


def units() -> Iterator[tuple[str, str, bool]]:
    for reference, bare, other in (
        (r"5 \text{ cm}", "5", r"5\mathrm{cm}"),
        (r"15\mbox{ cm}^2", "15", r"15 \text{ cm}^2"),
        (r"864 \mbox{ inches}^2", "864", r"864\text{ inches}^2"),
        (r"12 \text{ hours}", "12", r"12\,\text{hours}"),
        (r"3.5 \text{ meters}", "3.5", r"3.5 \, \mathrm{meters}"),
    ):
        yield reference, bare, True  # docs/rewards.md: the unit may be left out
        yield bare, reference, True
        yield reference, other, True
        yield reference, reference.replace(bare, f"{bare}7", 1), False


def roots() -> Iterator[tuple[str, str, bool]]:
    for square, rest in ((2, 2), (3, 5), (4, 3), (5, 7), (6, 2)):
        joined = square * square * rest
        yield rf"{square}\sqrt{{{rest}}}", rf"\sqrt{{{joined}}}", True
        yield rf"{square} \sqrt{{{rest}}}", rf"{square}\sqrt{rest}", True
        yield rf"\frac{{{square}}}{{\sqrt{{{rest}}}}}", rf"\frac{{{square}\sqrt{{{rest}}}}}{{{rest}}}", True
        yield rf"{square}\sqrt{{{rest}}}", rf"{rest}\sqrt{{{square + 10}}}", False
        yield rf"{square}+\sqrt{{{rest}}}", rf"\sqrt{{{rest}}}+{square}", True
    yield r"\sqrt[3]{16}", r"2\sqrt[3]{2}", True
    yield r"5 \sqrt[3]{4}", r"5 \cdot 4^{1/3}", True
    yield r"\sqrt{5}", r"5^{\frac{1}{2}}", True
    yield r"\sqrt{51}", "7.14", False
    yield r"\frac{1}{2-\sqrt{3}}", r"2+\sqrt{3}", True
    yield r"2-\sqrt{3}", r"2+\sqrt{3}", False


def powers() -> Iterator[tuple[str, str, bool]]:
    yield "2^{10}", "1024", True
    yield "1024", "2^10", True
    yield "2^{1009}", r"2 \cdot 2^{1008}", True
    yield "2^{1009}", "2^{1008}", False
    yield r"\frac{1}{x}", "x^{-1}", True
    yield "2^{k-1}", r"\frac{2^k}{2}", True
    yield "2^{k-n}", "2^{n-k}", False
    yield "e^{-2t}", r"\frac{1}{e^{2t}}", True
    yield "x^{1/2}", r"\sqrt{x}", True
    yield r"\frac{2016}{2017^{2}}", r"\frac{2016}{4068289}", True


def pi() -> Iterator[tuple[str, str, bool]]:
    for a, b in ((1, 2), (3, 4), (5, 6), (7, 3)):
        top = r"\pi" if a == 1 else rf"{a}\pi"
        yield rf"\frac{{{top}}}{{{b}}}", f"{top}/{b}", True
        yield rf"\frac{{{top}}}{{{b}}}", rf"\frac{{{a}}}{{{b}}}\pi", True
        yield rf"\frac{{{top}}}{{{b}}}", rf"\frac{{{top}}}{{{b + 1}}}", False
    yield r"12\pi", r"12 \pi", True
    yield r"12\pi", r"\pi \cdot 12", True
    yield r"18+2\pi", r"2\pi+18", True
    yield r"\pi", "3.14", False
    yield r"0.5\pi", r"\frac{\pi}{2}", True


def polynomials() -> Iterator[tuple[str, str, bool]]:
    for a, b in ((1, 2), (3, 5), (-2, 7), (4, -4)):
        expanded = f"x^2{a + b:+d}x{a * b:+d}" if a + b else f"x^2{a * b:+d}"
        yield f"(x{a:+d})(x{b:+d})", expanded, True
        yield expanded, f"(x{b:+d})(x{a:+d})", True
        yield expanded, f"{a * b:d} + x^2 {f'{a + b:+d}x' if a + b else ''}", True
        yield expanded, f"(x{a:+d})(x{b + 1:+d})", False
    yield "p - q", "-q+p", True
    yield "p - q", "q - p", False
    yield "n(n-1)", "n^2-n", True
    yield r"\frac{n(n+1)}{2}", r"\frac{1}{2}n(n+1)", True
    yield r"\frac{n(n+1)}{2}", r"\frac{n^2+n}{2}", True
    yield "2n", "n+n", True
    yield "6r^2-4r-24", "2(3r^2-2r-12)", True
    yield "x^3+3x-6", "x^3 - 6 + 3x", True
    yield "15x - 80", "5(3x-16)", True
    yield "15x - 80", "15y - 80", False
    yield r"\frac{11+9a}{20}", r"\frac{9a}{20}+\frac{11}{20}", True


def functions() -> Iterator[tuple[str, str, bool]]:
    yield r"\cot x", r"\frac{\cos x}{\sin x}", True
    yield r"\sin^2 x", "1-\\cos^2 x", True
    yield r"\sin(2t)", r"2\sin t\cos t", True
    yield r"\ln 8", r"3\ln 2", True
    yield r"\log_2 8", "3", True
    yield r"\frac{\log 2}{\log 2-\log 3}", r"\frac{\log 2}{\log(2/3)}", True
    yield r"\arcsin(10/13)", r"\sin^{-1}(10/13)", True
    yield r"\cot x", r"\tan x", False
    yield r"\frac{e^{t}}{3}", r"e^t/3", True
    yield r"\lfloor n/2 \rfloor", r"\left\lfloor \frac{n}{2} \right\rfloor", True
    yield r"|x-1|", r"\left|x-1\right|", True
    yield r"\sin(x)", r"\sin x", True


def complex_numbers() -> Iterator[tuple[str, str, bool]]:
    for a, b in ((6, 9), (-2, 7), (1, -12), (3, 4)):
        yield f"{a}{b:+d}i", f"{b}i{a:+d}", True
        yield f"{a}{b:+d}i", f"{a} {b:+d} i", True
        yield f"{a}{b:+d}i", f"{a}{-b:+d}i", False
    yield "3+4i", r"3+4\mathrm{i}", True
    yield r"1+\sqrt{3} i", r"1+i\sqrt{3}", True


def equations() -> Iterator[tuple[str, str, bool]]:
    for name, value in (("x", "5"), ("k", "3"), ("n", r"\frac{2}{3}"), ("a", r"2\sqrt{2}")):
        yield f"{name}={value}", value, True
        yield value, f"{name} = {value}", True
        yield f"{name}={value}", f"{name}=1+{value}", False
    yield "y = 2x + 3", "y=3+2x", True
    yield "y = 2x + 3", "2x + 3", True
    yield "y = 2x + 3", "y = 3x + 2", False
    yield "y = 2x + 3", "2x - y + 3 = 0", True
    yield "5x - 7y + 11z + 4 = 0", "-5x+7y-11z-4=0", True
    yield "5x - 7y + 11z + 4 = 0", "5x - 7y + 11z - 4 = 0", False
    yield "f(x)=x+1", "x+1", True
    yield "f(x)=2x", "f(x)=x+x", True


def inequalities() -> Iterator[tuple[str, str, bool]]:
    yield r"k \geqslant 2", r"k \ge 2", True
    yield r"k \geq 2", r"2 \leq k", True
    yield r"k \geq 2", r"k > 2", False
    yield r"x \geq 3", r"[3,\infty)", True
    yield r"-2 \le x \le 7", "[-2,7]", True
    yield r"x < 5", r"(-\infty,5)", True
    yield r"x \in [-2,7]", "[-2,7]", True
    yield "[-2,7]", r"x \in [-2,7]", True
    yield r"x \in [-2,7]", r"-2 \le x \le 7", True
    yield r"x \ne 3", r"x \neq 3", True
    yield r"x < 5", r"x < 6", False


def tuples() -> Iterator[tuple[str, str, bool]]:
    for a, b in (("3", "4"), (r"\frac{1}{2}", "7"), ("-2", r"\sqrt{3}"), ("0", r"\frac{\pi}{2}")):
        plain = f"({a},{b})"
        yield plain, f"( {a} , {b} )", True
        yield plain, rf"\left({a}, {b}\right)", True
        yield rf"\left( {a}, {b} \right)", plain, True
        yield plain, f"({b},{a})", False
        yield plain, f"({a},{b},0)", False
    yield r"(\frac{1}{2},3)", "(0.5, 3)", True
    yield "(15,-29)", "(15.0,-29.0)", True
    yield "(3, 4)", "3, 4", True
    yield "(6,31,-1)", r"\left(6, 31, -1\right)", True
    yield "(6,31,-1)", "(6,-1,31)", False
    yield "(-1,6)", "x=-1, y=6", True


def sets() -> Iterator[tuple[str, str, bool]]:
    orders = list(permutations(("1", r"\frac{3}{2}", r"\sqrt{5}")))
    reference = r"\{" + ",".join(orders[0]) + r"\}"
    for order in orders[1:]:
        yield reference, r"\{" + ", ".join(order) + r"\}", True
        yield reference, r"\left\{" + ",".join(order) + r"\right\}", True
        yield reference, ",".join(order), True
    yield reference, r"\{1,\frac{3}{2}\}", False
    yield reference, r"\{1,\frac{3}{2},\sqrt{6}\}", False
    yield r"\{1,2\}", r"\{2,1,1\}", True
    yield r"\emptyset", r"\varnothing", True
    yield r"\{1\pm\sqrt{5},-2\}", r"\{-2,1+\sqrt{5},1-\sqrt{5}\}", True


def lists() -> Iterator[tuple[str, str, bool]]:
    for order in list(permutations(("3", "5", "7")))[1:]:
        yield "3, 5, 7", ",".join(order), True
    yield "3, 5, 7", "3, 5", False
    yield "3, 5, 7", "3, 5, 8", False
    yield "-2,1", "1, -2", True
    yield "1,-2", r"x=1 \text{ or } x=-2", True
    yield "1,-2", r"1 \text{ and } -2", True
    yield r"1 \pm \sqrt{19}", r"1+\sqrt{19}, 1-\sqrt{19}", True
    yield r"1+\sqrt{19}, 1-\sqrt{19}", r"1 \pm \sqrt{19}", True
    yield r"1 \pm \sqrt{19}", r"1 \pm \sqrt{18}", False
    yield "(1,1), (3,2)", "(3,2),(1,1)", True
    yield "(1,1), (3,2)", "(1,1),(2,3)", False
    yield "$6764$,$10945$", "10945, 6764", True


def intervals() -> Iterator[tuple[str, str, bool]]:
    for low, high in (("2", "12"), (r"\frac{3}{5}", r"\frac{8}{3}"), (r"-\sqrt{3}", r"\sqrt{3}")):
        for left, right in ("()", "[]", "(]", "[)"):
            plain = f"{left}{low},{high}{right}"
            yield plain, rf"\left{left} {low}, {high} \right{right}", True
        yield f"[{low},{high}]", f"({low},{high}]", False
        yield f"[{low},{high})", f"[{low},{high}]", False
        yield f"[{low},{high}]", f"[{high},{low}]", False
    yield r"(5,\infty)", r"(5, +\infty)", True
    yield r"(-\infty, 0]", r"\left(-\infty,0\right]", True
    yield r"(-\infty, 2) \cup (3, \infty)", r"(3,\infty)\cup(-\infty,2)", True
    yield r"(-\infty, 2) \cup (3, \infty)", r"(-\infty,2)\cup[3,\infty)", False
    yield r"(2,12) \cup (12,102)", r"(12,102) \cup (2,12)", True
    yield r"(0.5,2]", r"(\frac{1}{2},2]", True
    yield r"(-\infty, 0) \cup\{1\}", r"\{1\} \cup (-\infty,0)", True


def matrices() -> Iterator[tuple[str, str, bool]]:
    for rows in ((("1", "2"), ("3", "4")), (("-1", "0"), ("0", "-1")), ((r"\frac{1}{2}", "0"), ("7", "-3"))):
        body = r" \\ ".join(" & ".join(row) for row in rows)
        turned = r" \\ ".join(" & ".join(row) for row in zip(*rows[::-1], strict=True))
        reference = rf"\begin{{pmatrix}} {body} \end{{pmatrix}}"
        yield reference, rf"\begin{{bmatrix}} {body} \end{{bmatrix}}", True
        yield reference, reference.replace(" ", ""), True
        yield reference, reference.replace(r"\\", r"\\[6pt]"), True
        yield reference, rf"\begin{{pmatrix}} {turned} \end{{pmatrix}}", False
    yield r"\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix}", r"\begin{pmatrix}\frac{1}{5}\\-\frac{18}{5}\end{pmatrix}", True
    yield r"\begin{pmatrix} 1/2 \\ 3 \end{pmatrix}", r"\begin{pmatrix} 0.5 \\ 3 \end{pmatrix}", True
    yield r"\begin{pmatrix} -7 \\ 16 \\ 5 \end{pmatrix}", r"\begin{pmatrix} -7 & 16 & 5 \end{pmatrix}", False


def text() -> Iterator[tuple[str, str, bool]]:
    for word in ("Evelyn", "ellipse", "even", "east"):
        yield rf"\text{{{word}}}", word, True
        yield word, rf"\text{{{word}}}", True
        yield rf"\text{{{word}}}", rf"\textbf{{{word.upper()}}}", True
        yield rf"\text{{{word}}}", rf"\mathrm{{{word}}}", True
        yield rf"\text{{{word}}}", word[::-1], False
        yield rf"\text{{{word}}}", f"not {word}", False
    yield r"\text{yes}", "Yes", True
    yield r"\text{yes}", "no", False


def choices() -> Iterator[tuple[str, str, bool]]:
    for letter, wrong in (("B", "C"), ("C", "A"), ("E", "D")):
        yield rf"\text{{({letter})}}", letter, True
        yield letter, f"({letter})", True
        yield letter, rf"\textbf{{({letter})}}", True
        yield rf"\text{{({letter})}}", rf"\text{{{letter}}}", True
        yield rf"\text{{({letter})}}", rf"\text{{({wrong})}}", False


def wrappers() -> Iterator[tuple[str, str, bool]]:
    for answer in ("42", r"\frac{3}{7}", "x^2+1"):
        for wrapped in (f"${answer}$", rf"\({answer}\)", f"{answer}.", f"**{answer}**", rf"\mathbf{{{answer}}}"):
            yield answer, wrapped, True
        yield f"${answer}$", answer, True
        yield answer, rf"\,{answer}\!", True
        yield answer, rf"\displaystyle {answer}", True


def bases() -> Iterator[tuple[str, str, bool]]:
    for digits, base in (("2516", 8), ("204", 5), ("4343", 6)):
        yield f"{digits}_{base}", f"{digits}_{{{base}}}", True
        yield f"{digits}_{{{base}}}", rf"{digits}_{{\text{{{base}}}}}", True
        yield f"{digits}_{base}", f"{digits}_{base + 1}", False
        yield f"{digits}_{base}", str(int(digits, base) + 1), False


def combinatorics() -> Iterator[tuple[str, str, bool]]:
    yield r"\binom{10}{3}", "120", True
    yield "120", "5!", True
    yield r"\binom{2n}{n}", r"{2n \choose n}", True
    yield r"\binom{2n}{n}", r"\frac{(2n)!}{n!n!}", True
    yield r"\frac{100!}{2^{50}}", r"100! / 2^{50}", True
    yield r"\binom{10}{3}", "210", False
    yield r"2021 \cdot 505 \cdot 337", "343944985", False
    yield r"2021 \cdot 505 \cdot 337", "343943885", True


def several() -> Iterator[tuple[str, str, bool]]:
    """What one rule does not have."""
    yield "17", "17.0000", True
    yield "-7", r"\left(-7\right)", True
    yield "-7", r"-\,7", True
    yield "3", r"\sqrt{9}", True
    yield "3+4", "7", True
    yield r"\frac{1}{2} \cdot 6", "3", True
    yield "0", "-0", True
    yield r"2 \times 3", "6", True
    yield r"\infty", r"+\infty", True
    yield r"-\infty", r"\infty", False
