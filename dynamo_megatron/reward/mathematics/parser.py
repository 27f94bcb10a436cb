r"""Parses the normal form of an answer (`text`) whole, or not at all: LaTeX, or mathematics as plain text.

Whatever the grammar does not know raises `NotMathematics`, so that nothing of an answer is ever dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import NoReturn

from dynamo_megatron.reward.mathematics.tokens import (
    GREEK,
    LONGEST,
    MAGNITUDES,
    TRIGONOMETRIC,
    NotMathematics,
    Token,
    Unit,
    is_unit,
    tokens,
    unit_of,
)
from dynamo_megatron.reward.mathematics.value import (
    DOTS,
    INFINITY,
    PI,
    REALS,
    Group,
    Node,
    Number,
    Op,
    Quantity,
    Relation,
    Symbol,
    compound,
    exact,
    is_plain_number,
    union_of,
    variables,
)

DEEPEST = 60  # brackets in brackets
OTHER_NAME = {"infty": INFINITY, "inf": INFINITY, "infinity": INFINITY, "oo": INFINITY, "ldots": DOTS, "pi": PI}
LETTERS = re.compile(GREEK.pattern + "|hbar|ell|emptyset|odot|oplus|nabla|partial|angle|triangle|aleph|mho|top")
MARKS = re.compile("vec|hat|bar|overline|d?dot|tilde|wide(?:hat|tilde)|overrightarrow|mathbb|mathbf")
RELATIONS = {
    **{"=": "=", "<": "<", ">": ">", "lt": "<", "gt": ">", "le": "<=", "ge": ">=", "ne": "!=", "<=": "<=", ">=": ">="},
    **{"!=": "!=", "==": "=", "in": "in", "approx": "approx", "equiv": "equiv", "sim": "sim", "propto": "propto"},
}
MODULO, ABOUT = ("bmod", "mod"), ("approx", "approximately", "about")
SETS = {"cup": "union", "cap": "cap", "setminus": "minus", "backslash": "minus"}


def parse(text: str) -> Node:
    """The answer that a normal form writes. Raises NotMathematics where any of it is not understood."""
    parser = _Parser(tokens(re.sub(r"\b(?:np|math|sp|sympy)\.", "", text)))
    node = parser.infix(("end",))
    parser.take("end")
    return node


class _Parser:
    def __init__(self, tokens: list[Token]) -> None:
        self.tokens, self.at, self.depth, self.bars = tokens, 0, 0, 0

    @property
    def next(self) -> Token:
        return self.tokens[self.at]

    def step(self) -> Token:
        self.at += 1
        return self.tokens[self.at - 1]

    def take(self, kind: str) -> Token:
        self.need(self.next.kind == kind)
        return self.step()

    def word(self) -> str:
        """The next token in lower case if it is a word, else ""."""
        return self.next.text.lower() if self.next.kind == "word" else ""

    def accept(self, *kinds: str) -> bool:
        if self.next.kind in kinds:
            self.at += 1
            return True
        return False

    def fail(self) -> NoReturn:
        raise NotMathematics(self.next.text)

    def need(self, fits: bool) -> None:
        if not fits:
            self.fail()

    # Lists, relations, sets

    def answer(self, ends: tuple[str, ...]) -> Node:
        """A list, or its only element."""
        items, either = [self.element()], False
        while self.next.kind in (",", ";"):
            either = self.step().text.lower() == "or"
            while self.accept(",", ";"):  # "1, 2, and 3"
                pass
            if self.next.kind in ends:
                break
            items.append(self.element())
        if either and (union := union_of(items)) is not None:
            return union
        return items[0] if len(items) == 1 else compound(items) or Group("list", tuple(items))

    def infix(self, ends: tuple[str, ...]) -> Node:
        r"""a \choose b and a \over b, which take all of their group."""
        node = self.answer((*ends, "\\choose", "\\over"))
        if self.next.kind in ("\\choose", "\\over"):
            name = "binom" if self.step().text == "choose" else "div"
            node = Op(name, (node, self.answer(ends)))
        return node

    def element(self) -> Node:
        members, signs, modulus = [self.side()], [], None
        while (sign := RELATIONS.get(self.next.kind.removeprefix("\\"))) is not None:
            self.step()
            signs.append(sign)
            members.append(self.side())
        if self.bracketed() in ABOUT:  # 1/3 (approximately 0.333)
            self.at += 2
            signs.append("approx")
            members.append(self.sum())
            self.take(")")
        if signs and self.accept("\\bmod", "\\pmod"):
            modulus = self.unary()
        elif signs and self.bracketed() in MODULO:
            self.at += 2
            modulus = self.sum()
            self.take(")")
        return Relation(tuple(signs), tuple(members), modulus) if signs else members[0]

    def side(self) -> Node:
        parts, kind = [self.quantity()], ""
        while (found := SETS.get(self.next.kind.removeprefix("\\"))) is not None:
            self.need(kind in ("", found))
            kind = found
            self.step()
            parts.append(self.quantity())
        return Group(kind, tuple(parts)) if kind else parts[0]

    def quantity(self) -> Node:
        if self.next.kind == "time":
            return self.time()
        if self.next.kind == "currency":
            unit = unit_of([self.step().text])
            assert unit is not None
            value = self.magnitude(self.sum())
            after = self.units()
            self.need(after is None or after.powers == unit.powers)
            return Quantity(value, unit)
        value = self.magnitude(self.sum())
        unit = self.units()
        if unit is None:
            return value
        self.need(unit.known or is_plain_number(value))
        if self.next.kind != "number":
            return Quantity(value, unit)
        return compound([Quantity(value, unit), self.quantity()]) or self.fail()  # 5 hours 20 minutes

    def magnitude(self, value: Node) -> Node:
        if self.word() == "percent":
            self.step()
            return Op("percent", (value,))
        while size := MAGNITUDES.get(self.word().removesuffix("s")):
            self.step()
            value = Op("mul", (Number(Fraction(size)), value))
        return value

    def units(self) -> Unit | None:
        words: list[str | int] = []
        if self.next.kind == "currency":
            words.append(self.step().text)
        while self.next.kind == "word" or (words and self.next.kind in ("/", "^", "\\cdot")):
            token = self.step()
            if token.kind in ("word", "/"):
                words.append(token.text)
            elif token.kind == "^":
                power = exact(self.exponent())
                self.need(power is not None and power.denominator == 1 and abs(power) <= 99)
                words.append(int(power))  # type: ignore[arg-type]
            if token.kind in ("/", "\\cdot") and self.next.kind == "name" and is_unit(self.next.text):
                words.append(self.step().text)  # km/h
        if not words:
            return None
        unit = unit_of(words)
        self.need(unit is not None and len(words) <= 8)
        return unit

    def time(self) -> Node:
        found = re.match(r"(\d+):(\d+)(?::(\d+))?\W*(?:text\W*)?([AaPp])?", self.step().text)
        assert found is not None
        half = (found[4] or "").lower()
        hour = int(found[1]) % 12 + (12 if half == "p" else 0) if half else int(found[1])
        values = (hour, found[2], found[3] or 0)
        return Group("clock" if half or hour > 12 else "12-hour clock", tuple(Number(Fraction(v)) for v in values))

    # Expressions

    def sum(self) -> Node:
        node = self.deeper(self.product)
        while self.next.kind in ("+", "-", "\\pm", "\\mp"):
            sign = self.step().kind
            node = Op({"+": "add", "-": "sub", "\\pm": "pm", "\\mp": "mp"}[sign], (node, self.deeper(self.product)))
        return node

    def deeper(self, part: Callable[[], Node]) -> Node:
        self.depth += 1
        if self.depth > DEEPEST:
            raise NotMathematics("too deep")
        node = part()
        self.depth -= 1
        return node

    def product(self) -> Node:
        node = self.unary()
        while True:
            if self.accept("*", "\\times", "\\cdot"):
                node = Op("times", (node, self.unary()))
            elif self.accept("/"):
                node = Op("div", (node, self.unary()))
            elif self.starts_factor():
                node = Op("mul", (node, self.power()))
            else:
                return node

    def starts_factor(self) -> bool:
        kind = self.next.kind
        if kind == "number":  # "n 2^n" is a product, "3 4" and "x2" are none
            before, apart = self.tokens[self.at - 1].kind, self.next.gap or self.tokens[self.at + 1].kind == "^"
            return before in (")", "}", "!") or (apart and (before == "name" or before.startswith("\\")))
        if kind == "|":
            return self.bars == 0
        if self.bracketed() in MODULO + ABOUT:
            return False
        if kind in ("name", "function", "(", "[", "{", "\\frac", "\\sqrt", "\\binom", "\\lfloor", "\\lceil"):
            return True
        name = kind.removeprefix("\\")
        return bool(name in OTHER_NAME or LETTERS.fullmatch(name) or MARKS.fullmatch(name))

    def bracketed(self) -> str:
        """What stands behind an opening bracket, if this is the next token."""
        return self.tokens[self.at + 1].text if self.next.kind == "(" else ""

    def unary(self) -> Node:
        return self.signed(self.unary) if self.next.kind in ("-", "+", "\\pm", "\\mp") else self.power()

    def signed(self, part: Callable[[], Node]) -> Node:
        sign, operand = self.step().kind, self.deeper(part)
        if sign == "+":
            return operand
        return Op("neg", (operand,)) if sign == "-" else Op(sign[1:], (Number(Fraction(0)), operand))

    def power(self) -> Node:
        node = self.postfix(self.atom())
        if self.accept("^"):
            if self.accept("\\circ"):
                return self.postfix(Op("degrees", (node,)))
            power = self.exponent()
            if isinstance(node, Group) and node.kind == "()" and power in (Symbol("T"), Symbol("top")):
                return Group("matrix", tuple(Group("row", (item,)) for item in node.items))
            node = self.postfix(Op("pow", (node, power)))
        return node

    def exponent(self) -> Node:
        if self.accept("{"):
            node = self.answer(("}",))
            self.take("}")
            return node
        if self.next.kind in ("-", "+"):
            return self.signed(self.exponent)
        node = self.atom()
        return Op("pow", (node, self.exponent())) if self.accept("^") else node

    def postfix(self, node: Node) -> Node:
        while self.next.kind in ("!", "%"):
            if self.step().kind == "%":
                node = Op("percent", (node,))
            else:
                node = Op("factorial2" if self.accept("!") else "factorial", (node,))
        return node

    def atom(self) -> Node:
        token = self.next
        name = token.kind.removeprefix("\\")
        if token.kind == "currency":  # the second one of \$30 - \$24
            self.step()
        if token.kind in ("number", "currency"):
            return self.number()
        if token.kind == "mixed":
            return Number(sum(map(Fraction, self.step().text.split()), Fraction(0)))
        if token.kind == "name" or LETTERS.fullmatch(name):
            return self.symbol(self.step().text)
        if token.kind in ("function", "\\sqrt"):
            return self.function(self.step().text)
        if token.kind in ("(", "[", "\\{"):
            return self.brackets()
        if token.kind == "{":
            node = self.braces()
            return self.symbol(node.name) if isinstance(node, Symbol) and self.next.kind == "_" else node  # {g}_k
        if self.accept("|"):
            self.bars += 1
            node = self.sum()
            self.bars -= 1
            self.take("|")
            return Op("abs", (node,))
        if token.kind == "word":
            return self.named_in_words()
        if self.accept("\\frac", "\\binom"):
            return Op("div" if name == "frac" else "binom", (self.argument(), self.argument()))
        if self.accept("\\lfloor", "\\lceil"):
            node = self.sum()
            self.take(token.kind.replace("l", "r", 1))
            return Op("floor" if name == "lfloor" else "ceil", (node,))
        if token.kind == "\\begin":
            return self.matrix()
        if name in OTHER_NAME:
            self.step()
            return self.symbol(name) if OTHER_NAME[name] == PI else OTHER_NAME[name]
        if MARKS.fullmatch(name):
            self.step()
            return self.symbol(f"{name} {self.raw()}")
        self.fail()

    def named_in_words(self) -> Node:
        r"""\text{Total area} in \text{Total area} = 5; words are nothing else here."""
        words = []
        while self.next.kind == "word":
            words.append(self.step().text)
        return Symbol(" ".join(words)) if self.next.kind in ("=", "\\approx") else self.fail()

    def number(self) -> Node:
        text = self.take("number").text
        if self.accept("_"):
            base = self.raw()
            self.need(text.isdecimal() and base.isdecimal() and len(base) <= 2)
            return Number(Fraction(int(text)), base=int(base))
        if "." in text and self.accept("\\overline", "\\bar", "\\dot"):
            return self.repeating(text, self.raw())
        if "." in text and self.next.kind == "\\ldots" and (same := re.search(r"(\d)\1\1$", text)):
            self.step()
            return self.repeating(text[: -len(same[0])], same[1])
        digits, _, power = text.partition("e")
        self.need(len(digits) <= LONGEST and abs(int(power or 0)) <= 30_000)
        places = len(digits.partition(".")[2])
        return Number(Fraction(text), places - int(power or 0) if places or power else None)

    def repeating(self, text: str, digits: str) -> Node:
        self.need(digits.isdecimal() and "e" not in text)
        places = len(text.partition(".")[2])
        return Number(Fraction(text) + Fraction(int(digits), (10 ** len(digits) - 1) * 10**places))

    def symbol(self, name: str) -> Node:
        while self.next.kind in ("_", "'"):
            name += "'" if self.step().kind == "'" else f"_{self.raw()}"
        if name in ("f", "g", "h", "F", "G", "H") or name.rstrip("'") != name:
            if self.next.kind == "(":
                return Op(f"call {name}", self.arguments())
        elif [token.kind for token in self.tokens[self.at : self.at + 3 : 2]] == ["(", ")"]:
            inside, after = self.tokens[self.at + 1], self.tokens[self.at + 3]  # I(0) and p(x) = are no products
            defined = self.at == 1 and inside.kind == "name" and inside.text != name not in ("pi", "e", "i")
            if inside.text == "0" or (defined and after.kind == "="):
                return Op(f"call {name}", self.arguments())
        return Symbol(name)

    def raw(self) -> str:
        """The text of a group or of one token: a subscript, or what a mark is over."""
        if not self.accept("{"):
            return self.step().text if self.next.kind != "end" else self.fail()
        parts = []
        while not self.accept("}"):
            self.need(self.next.kind != "end")
            parts.append(f"{{{self.raw()}}}" if self.next.kind == "{" else self.step().text)
        return "".join(parts)

    def argument(self) -> Node:
        r"""A group in braces, or one digit, letter or command: the arguments of \frac."""
        token = self.next
        if token.kind == "{":
            return self.braces()
        if token.kind == "number" and len(token.text) > 1 and token.text.isdecimal():
            self.tokens[self.at] = Token("number", token.text[1:])
            return Number(Fraction(token.text[0]))
        return self.atom()

    def arguments(self) -> tuple[Node, ...]:
        self.take("(")
        found = self.answer((")",))
        self.take(")")
        return found.items if isinstance(found, Group) and found.kind == "list" else (found,)

    def function(self, name: str) -> Node:
        if name in ("sqrt", "cbrt"):
            index: Node = Number(Fraction(2 if name == "sqrt" else 3))
            if self.accept("["):
                index = self.sum()
                self.take("]")
            operand = self.braces() if self.next.kind == "{" else self.atom()
            return Op("pow", (operand, Op("div", (Number(Fraction(1)), index))))
        power, base = None, None
        while self.next.kind in ("^", "_", "'"):
            if self.accept("^"):
                power = self.exponent()
            else:
                self.need(name == "log" and self.accept("_"))
                base = self.argument()
        args = self.arguments() if self.next.kind == "(" else (self.operand(),)
        if name == "log" and base is not None:
            node = Op("log", (*args, base))
        else:
            node = Op("ln" if name == "log" and len(args) == 1 else name, args)
        if power is None:
            return node
        if power == Op("neg", (Number(Fraction(1)),)) and name in TRIGONOMETRIC:
            return Op(f"arc{name}", args)
        return Op("pow", (node, power))

    def operand(self) -> Node:
        """What a function without brackets is of: \\sin 2t, up to the next sign or function."""
        if self.next.kind in ("-", "+"):
            return self.signed(self.operand)
        node = self.power()
        while self.starts_factor() and self.next.kind not in ("function", "(", "["):
            node = Op("mul", (node, self.power()))
        return node

    def braces(self) -> Node:
        self.take("{")
        self.need(self.next.kind != "}")
        node = self.infix(("}",))
        self.take("}")
        return Group("set", node.items) if isinstance(node, Group) and node.kind == "list" else node

    def brackets(self) -> Node:
        opening = self.step().kind
        closings = ("\\}",) if opening == "\\{" else (")", "]")
        if opening == "\\{" and self.accept("\\}"):
            return Symbol("emptyset")
        if opening == "\\{" and self.next.kind == "name" and self.tokens[self.at + 1].kind in ("|", ":", "\\in"):
            return self.described()
        bars, self.bars = self.bars, 0
        node = self.answer(closings)
        self.bars = bars
        self.need(self.next.kind in closings)
        kind = opening + self.step().kind
        items = node.items if isinstance(node, Group) and node.kind == "list" else (node,)
        if opening == "\\{":
            return Group("set", items)
        if len(items) > 1 or isinstance(items[0], Quantity):
            return Group(kind, items)
        return items[0] if kind in ("()", "[]") else self.fail()

    def described(self) -> Node:
        r"""x \in \mathbb{R} | x > 2 \}, as x > 2."""
        name = self.step().text
        if self.accept("\\in"):
            self.bars += 1
            self.need(self.side() == REALS)
            self.bars -= 1
        self.need(self.accept("|", ":"))
        node = self.answer(("\\}",))
        self.need(isinstance(node, Relation) or (isinstance(node, Group) and node.kind == "union"))
        self.need(name in variables(node))
        self.take("\\}")
        return node

    def matrix(self) -> Node:
        self.step()
        kind = self.raw()
        self.need(kind in ("pmatrix", "bmatrix", "matrix", "array", "vmatrix", "Bmatrix", "smallmatrix"))
        if kind == "array":
            self.raw()
        rows: list[Group] = []
        while self.next.kind != "\\end":
            row = [self.element()]
            while self.accept("&"):
                row.append(self.element())
            rows.append(Group("row", tuple(row)))
            if not self.accept("\\\\"):
                break
        self.take("\\end")
        self.need(self.raw() == kind)
        return Group("determinant" if kind == "vmatrix" else "matrix", tuple(rows))
