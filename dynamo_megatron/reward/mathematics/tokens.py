r"""The tokens of an answer's normal form (`text`): numbers, names, words, functions, commands and signs; and the units
of quantities."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

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
MIXED = re.compile(r"(\d+)(?: ?\\frac ?(?:\{(\d+)\}|(\d)) ?(?:\{(\d+)\}|(\d)(?!\d))| (\d+)/(\d+)(?![\d.]))")
TOKEN = re.compile(
    r"(?P<time>(?<![\d:])\d{1,2}:[0-5]\d(?::[0-5]\d)?"
    r"(?: ?[AaPp]\.? ?[Mm]\b\.?| ?\\text\{ ?[AaPp]\.?[Mm]\.? ?\})?(?![\d:]))"
    r"|(?P<number>(?:\d{1,3}(?:(?:,|\{,\})\d{3})+(?!\d|,\d)|\d+)(?:\.\d+|\.(?!\d))?|\.\d+)"
    r"|(?P<text>\\(?:text|mathrm)\{(?P<inside>[^{}]*)\})|(?P<row>\\\\)|(?P<command>\\(?:[A-Za-z]+|[{}|]))"
    r"|(?P<letters>[A-Za-z]+)|(?P<word>[€£¥₹₩¢]|[^\W\dA-Za-z_]+)|(?P<sign><=|>=|(?<= )!=|==|[!-/:-@\[-`{-~])"
)
BRACKETS = {"(": 1, "[": 1, "{": 1, "\\{": 1, ")": -1, "]": -1, "}": -1, "\\}": -1}
JOINING = {"and": "and", "or": "or", "和": "and", "或": "or", "或者": "or"}
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
            self._letters(part, gap, last=found.end() == len(text))
        elif found["word"]:  # of a script without Latin letters
            kind = "currency" if part in CURRENCIES else "," if part in JOINING else "word"
            self.tokens.append(Token(kind, JOINING.get(part, part), gap))
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
        whole, top, bottom = filter(None, found.groups())
        if not 0 < int(top) < int(bottom):
            return None
        self.tokens.append(Token("mixed", f"{whole} {top}/{bottom}", gap))
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
            elif part.lower() in JOINING:
                self.tokens.append(Token(",", JOINING[part.lower()], gap))
            elif not part[0].isalpha():
                self.tokens.append(Token(part, part, gap))
            elif part in FUNCTIONS and not (after_number and is_unit(part)):
                self.tokens.append(Token("function", part, gap))
            elif len(part) > 1 or (after_number and is_unit(part)):
                self.tokens.append(Token("word", part, gap))
            else:
                self.tokens.append(Token("name", part, gap))
            gap, after_number = True, True

    def _letters(self, run: str, gap: bool, last: bool) -> None:
        previous = self.tokens[-1].kind if self.tokens else ""
        if run in FUNCTIONS and not (last and previous == "number" and run in ("min", "sec", "lb")):
            self.tokens.append(Token("function", run, gap))
        elif run in NAMED or GREEK.fullmatch(run):
            self.tokens.append(Token("\\" + run, run, gap))
        elif run.lower() in JOINING:
            self.tokens.append(Token(",", JOINING[run.lower()], gap))
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


# Units

# name: (dimension, how many of the dimension's first unit)
UNITS: dict[str, tuple[str, Fraction]] = {}
MAGNITUDES = {
    **{"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12},
    **{"万": 10**4, "萬": 10**4, "亿": 10**8, "億": 10**8, "lakh": 10**5, "crore": 10**7},
}
# Words after a number that change its value, and which no table here knows: no unit.
NO_UNIT = re.compile(
    r"hal(?:f|ves)|(?:third|quarter)s?|(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|\w+teen|\w+tie|hundred|thousand"
    r"|\w+illion)ths?|\w+illions?|squared|cubed|factorial|times|plus|minus|over|more|less|at|least|most|about|approximately"
    r"|per|percent|base|mod|modulo|to|the|of|by|or|and|not|gross|score|couple|double[ds]?|tripled?|halved|twice|tens"
    r"|zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|ppm|permille|grand|wrong|false"
    r"|incorrect|negative|below|above|inverse"
)


for _dimension, _factors in {
    "time": {"1": "s sec second 秒", "60": "min minute 分钟 分鐘 分", "3600": "h hr hour 小时 小時 時間"}
    | {"86400": "day 天 日", "604800": "wk week 周 週"},
    "month": {"1": "month 月 个月", "12": "yr year 年 岁 歳"},
    "length": {"0.001": "mm millimeter millimetre 毫米", "0.01": "cm centimeter centimetre 厘米 公分"}
    | {"0.1": "dm decimeter decimetre 分米", "1": "m meter metre 米", "1000": "km kilometer kilometre 千米 公里"}
    | {"1e-6": "μm micrometer micron", "1e-9": "nm nanometer nanometre", "0.0254": "in inch", "0.3048": "ft foot feet"}
    | {"0.9144": "yd yard", "1609.344": "mi mile", "1e-10": "Å angstrom"},
    "mass": {"0.001": "mg milligram 毫克", "1": "g gram 克", "1000": "kg kilogram 千克 公斤", "1000000": "tonne 吨"}
    | {"453.59237": "lb lbs pound 磅", "28.349523125": "oz ounce"},
    "volume": {"0.001": "ml mL milliliter millilitre 毫升", "1": "L l liter litre 升"},
    "gallons": {"16": "gallon gal", "4": "quart qt", "2": "pint pt", "1": "cup"},
    "dollar": {"1": "dollar USD 美元", "1/100": "cent ¢ penny pennies"},
    "euro": {"1": "euro € EUR 欧元"},
    "sterling": {"1": "£ GBP"},
    "yuan": {"1": "yuan 元 RMB CNY 块"},
    "yen": {"1": "yen ¥ 円 JPY"},
    "rupee": {"1": "rupee ₹ Rs INR"},
    "won": {"1": "won ₩ 원"},
    "degree": {"1": "degree deg 度"},
    "radian": {"1": "radian rad 弧度"},
    "unit": {"1": "unit"},
    "joule": {"1": "J joule", "1000": "kJ kilojoule"},
    "newton": {"1": "N newton"},
    "watt": {"1": "W watt", "1000": "kW kilowatt"},
    "volt": {"1": "V volt"},
    "kelvin": {"1": "K kelvin"},
    "coulomb": {"1": "C coulomb"},
    "ampere": {"1": "A amp ampere"},
    "farad": {"1": "F farad"},
    "tesla": {"1": "T tesla"},
    "hertz": {"1": "Hz hertz", "1000": "kHz", "1000000": "MHz"},
    "pascal": {"1": "Pa pascal", "1000": "kPa"},
    "electronvolt": {"1": "eV", "1000000": "MeV"},
    "mole": {"1": "mol mole"},
}.items():
    for _factor, _names in _factors.items():
        UNITS |= dict.fromkeys(_names.split(), (_dimension, Fraction(_factor)))
COMPOUND = {"mph": ("mile", "/", "hour"), "kmh": ("km", "/", "hour"), "kph": ("km", "/", "hour")}
AREA = {"平方": 2, "立方": 3, "square": 2, "sq": 2, "cubic": 3, "cu": 3}
# Unit names that are also written outside of \text{}, where other letters are variables.
BARE = re.compile("[cmkdn]m|[km]g|lbs?|oz|ft|yd|hrs?|mph|km?ph|kmh|m[lL]|mins?|secs?|[kM]?Hz|[kM]?eV|k[JW]|kPa|sq")
CURRENCIES = "€£¥₹₩¢"


class Unit:
    """A product of powers of units. Two units are comparable where `powers` are the same; `factor` converts."""

    def __init__(self) -> None:
        self.powers: dict[str, int] = {}
        self.factor = Fraction(1)
        self.known = True

    def add(self, name: str, power: int) -> None:
        dimension, factor = _unit(name) or ("", Fraction(1))
        if not dimension:
            self.known = False
            dimension = name.lower().removesuffix("es").removesuffix("s")
        self.factor *= factor**power
        self.powers[dimension] = self.powers.get(dimension, 0) + power
        if self.powers[dimension] == 0:
            del self.powers[dimension]


def is_unit(word: str) -> bool:
    return _unit(word) is not None or word in COMPOUND


def unit_of(words: Sequence[str | int]) -> Unit | None:
    """The unit of `["square", "inch"]`, `["cm", 2]` (an exponent), `["m", "/", "s", 2]`, `["miles", "per", "hour"]` or
    `["apples"]`; None where the words are no unit."""
    unit, sign, power = Unit(), 1, 1
    flat = [part for word in words for part in COMPOUND.get(word, (word,))]  # type: ignore[call-overload]
    for place, word in enumerate(flat):
        if isinstance(word, int):
            continue
        if word in ("/", "per"):
            sign = -1
            continue
        for prefix, raised in AREA.items():
            if word.startswith(prefix) and (prefix == word or prefix in ("平方", "立方")):
                power, word = raised, word.removeprefix(prefix)
        if not word:
            continue
        if NO_UNIT.fullmatch(word.lower()) or word.lower() in MAGNITUDES:
            return None
        after = flat[place + 1] if place + 1 < len(flat) else None
        unit.add(word, sign * (after if isinstance(after, int) else power))
        power = 1
    return unit if unit.powers or unit.known else None


def is_larger(first: str, second: str) -> bool:
    """Whether the first of two words is the larger unit of one dimension, as hours of hours and minutes."""
    one, other = _unit(first), _unit(second)
    return one is not None and other is not None and one[0] == other[0] and one[1] > other[1]


def _unit(word: str) -> tuple[str, Fraction] | None:
    if word in UNITS or len(word) == 1:  # M is no metre
        return UNITS.get(word)
    lower = word.lower().rstrip(".")
    names = (lower, lower.removesuffix("s"), lower.removesuffix("es"))
    return next((UNITS[name] for name in names if name in UNITS and len(name) > 1), None)


# The units that are numbers, by the operations that write them: 30° is also pi/6, and 10% is 0.1.
PURE = {"degrees": Unit(), "percent": Unit()}
PURE["degrees"].add("degree", 1)
PURE["percent"].add("percent", 1)
