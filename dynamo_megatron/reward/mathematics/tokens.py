r"""The tokens of an answer's normal form (`text`): numbers, names, words, functions, commands and signs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dynamo_megatron.reward.mathematics.units import BARE, CURRENCIES, MAGNITUDES, is_unit

LONGEST = 2000  # characters


class NotMathematics(Exception):
    """The text is not an answer that the grammar knows."""


TRIGONOMETRIC = [kind + name for kind in ("", "arc", "a") for name in ("sin", "cos", "tan", "cot", "sec", "csc")]
HYPERBOLIC = [kind + name for kind in ("", "arc", "a") for name in ("sinh", "cosh", "tanh", "coth")]
OTHER = ["exp", "ln", "log", "lg", "lb", "sqrt", "cbrt", "abs", "floor", "ceil", "gcd", "lcm", "max", "min"]
FUNCTIONS = frozenset(TRIGONOMETRIC + HYPERBOLIC + OTHER)
NAMED = ("infty", "inf", "infinity", "oo", "ldots", "pi")
GREEK = re.compile(
    "alpha|beta|[Gg]amma|[Dd]elta|epsilon|z?eta|[Tt]heta|iota|kappa|[Ll]ambda|mu|nu|[Xx]i|Pi|rho|[Ss]igma|tau|[Uu]psilon"
    "|[Pp][hs]i|chi|[Oo]mega"
)
MIXED = re.compile(
    r"(?P<whole>\d+)(?: ?\\frac ?(?:\{(?P<top>\d+)\}|(?P<digit>\d)) ?(?:\{(?P<bottom>\d+)\}|(?P<last>\d)(?!\d))"
    r"| (?P<above>\d+)/(?P<below>\d+)(?![\d.]))"
)
TOKEN = re.compile(
    r"(?P<time>(?<![\d:])\d{1,2}:[0-5]\d(?::[0-5]\d)?"
    r"(?: ?[AaPp]\.? ?[Mm]\b\.?| ?\\text\{ ?[AaPp]\.?[Mm]\.? ?\})?(?![\d:]))"
    r"|(?P<number>(?:\d{1,3}(?:(?:,|\{,\})\d{3})+(?!\d|,\d)|\d+)(?:\.\d+|\.(?!\d))?|\.\d+)"
    r"|(?P<text>\\(?:text|mathrm)\{(?P<inside>[^{}]*)\})|(?P<row>\\\\)|(?P<command>\\(?:[A-Za-z]+|[{}|]))"
    r"|(?P<letters>[A-Za-z]+)|(?P<word>[€£¥₹₩¢]|[^\W\dA-Za-z_]+)|(?P<sign><=|>=|(?<= )!=|==|[!-/:-@\[-`{-~])"
)
BRACKETS = {"(": 1, "[": 1, "{": 1, "\\{": 1, ")": -1, "]": -1, "}": -1, "\\}": -1}
EXPONENT = re.compile(r"[eE]([-+]?\d{1,6})(?![\d.\w{])")


@dataclass(frozen=True)
class Token:
    kind: str  # "number", "mixed", "name", "word", "currency", "function", "time", "end", or the sign or command itself
    text: str
    gap: bool = False  # white space before it


def tokens(text: str) -> list[Token]:
    """The tokens of a normal form, with "end" as the last one. Raises NotMathematics."""
    if len(text) > LONGEST:
        raise NotMathematics("too long")
    return _Lexer(text).tokens


class _Lexer:
    """`brackets`: how many are open. A comma in brackets separates, and joins no thousands."""

    def __init__(self, text: str) -> None:
        self.tokens: list[Token] = []
        place = brackets = 0
        while place < len(text):
            if text[place] == " ":
                place += 1
                continue
            found = TOKEN.match(text, place)
            if found is None:
                raise NotMathematics(text[place])
            place = self._add(text, found, place > 0 and text[place - 1] == " ", brackets)
            brackets += BRACKETS.get(found[0], 0)
        self.tokens.append(Token("end", ""))

    def _add(self, text: str, found: re.Match[str], gap: bool, brackets: int) -> int:
        """Adds the token or tokens of `found`, and returns where the next one begins."""
        part = found[0]
        if found["number"]:
            return self._mixed(text, found.start(), gap) or self._number(text, found, gap, brackets)
        if found["text"]:
            self._text(found["inside"], gap)
        elif found["letters"]:
            self._letters(part, gap)
        elif found["word"]:  # of a script without Latin letters
            self.tokens.append(Token("currency" if part in CURRENCIES else "word", part, gap))
        elif found["command"]:
            kind = "currency" if part == "\\dollar" else "function" if part[1:] in FUNCTIONS else part
            self.tokens.append(Token(kind, part[1:], gap))
        else:
            self.tokens.append(Token("time" if found["time"] else part, part, gap))
        return found.end()

    def _mixed(self, text: str, start: int, gap: bool) -> int | None:
        r"""1\frac{1}{4} and 1 1/4: an integer and a proper fraction of integers, where the integer is no exponent."""
        found = MIXED.match(text, start)
        if found is None or (self.tokens and self.tokens[-1].kind in ("^", "_", "\\frac", "\\binom", "\\sqrt")):
            return None
        top, bottom = (
            found["top"] or found["digit"] or found["above"],
            found["bottom"] or found["last"] or found["below"],
        )
        if not 0 < int(top) < int(bottom):
            return None
        self.tokens.append(Token("mixed", f"{found['whole']} {top}/{bottom}", gap))
        return found.end()

    def _number(self, text: str, found: re.Match[str], gap: bool, brackets: int) -> int:
        part = found[0]
        if brackets and "," in part.replace("{,}", ""):
            part = part.partition(",")[0]
        end = found.start() + len(part)
        digits = part.replace("{,}", "").replace(",", "")
        power = None if part.endswith(".") else EXPONENT.match(text, end)
        self.tokens.append(Token("number", f"{digits}e{power[1]}" if power else digits, gap))
        return power.end() if power else end

    def _text(self, inside: str, gap: bool) -> None:
        after_number = bool(self.tokens) and self.tokens[-1].kind in ("number", "}", ")", "name", "word", "^")
        for found in re.finditer(r"[^\W\d_]+|\d+(?:\.\d+)?|\S", inside):
            part = found[0]
            if part[0].isdecimal():
                self.tokens.append(Token("number", part, gap))
            elif part.lower() in ("and", "or"):
                self.tokens.append(Token(",", part, gap))
            elif not part[0].isalpha():
                self.tokens.append(Token(part, part, gap))
            elif part in FUNCTIONS and not (after_number and is_unit(part)):
                self.tokens.append(Token("function", part, gap))
            elif len(part) > 1 or (after_number and is_unit(part)):
                self.tokens.append(Token("word", part, gap))
            else:
                self.tokens.append(Token("name", part, gap))
            gap, after_number = True, True

    def _letters(self, run: str, gap: bool) -> None:
        previous = self.tokens[-1].kind if self.tokens else ""
        if run in FUNCTIONS:
            self.tokens.append(Token("function", run, gap))
        elif run in NAMED or GREEK.fullmatch(run):
            self.tokens.append(Token("\\" + run, run, gap))
        elif run.lower() in ("and", "or"):
            self.tokens.append(Token(",", run, gap))
        elif run == "mod":
            self.tokens.append(Token("\\bmod", run, gap))
        elif run == "in" and previous == "number" and len(self.tokens) > 1 and self.tokens[-2].kind == "word":
            self.tokens.append(Token("word", run, gap))  # 5 ft 6 in
        elif (
            (BARE.fullmatch(run) and previous in ("number", "}", ")", "word", "name", "\\pi"))
            or len(run) >= 4
            or run.lower() in MAGNITUDES
            or (len(run) > 1 and previous == "word")
        ):
            self.tokens.append(Token("word", run, gap))
        else:
            self.tokens += [Token("name", letter, gap and k == 0) for k, letter in enumerate(run)]
