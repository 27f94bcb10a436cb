r"""The normal form of an answer's text: Unicode, LaTeX formatting and words, written in one way.

The text after `normal_form` is plain LaTeX with ASCII signs. `same_text` compares two such texts.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

# Superscripts before NFKC, which makes 4² into 42.
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ", "0123456789+-=()ni")
SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎", "0123456789+-=()")
RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ]+")
LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎]+")
VULGAR = re.compile("[¼½¾⅐-⅞]")
SIGNS = {
    **dict.fromkeys("−–—‒‐‑﹣－", "-"),
    **dict.fromkeys("⋅·∙•", r"\cdot "),
    **dict.fromkeys("÷⁄∕", "/"),
    **dict.fromkeys("…⋯", r"\ldots "),
    **dict.fromkeys("≤⩽", r"\le "),
    **dict.fromkeys("≥⩾", r"\ge "),
    **dict.fromkeys("°º", r"^\circ "),
    **dict.fromkeys("′’‘", "'"),
    **dict.fromkeys("、،", ","),
    **dict.fromkeys("\u200b\ufeff", ""),
    **{"×": r"\times ", "∗": "*", "√": r"\sqrt ", "∛": r"\sqrt[3]", "∞": r"\infty ", "±": r"\pm ", "∓": r"\mp "},
    **{"∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "∖": r"\setminus ", "∠": r"\angle "},
    **{"≠": r"\ne ", "≈": r"\approx ", "≡": r"\equiv ", "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil "},
    **{"⌉": r"\rceil ", "℃": r"^\circ C", "℉": r"^\circ F", "″": "''", "。": "."},
    **{sign: rf"\mathbb{{{letter}}}" for sign, letter in zip("ℝℤℕℚℂ", "RZNQC", strict=True)},
}
SAME_COMMAND = {
    **dict.fromkeys(["dfrac", "tfrac", "cfrac"], "frac"),
    **dict.fromkeys(["dbinom", "tbinom"], "binom"),
    **dict.fromkeys(["leq", "leqslant", "leqq"], "le"),
    **dict.fromkeys(["geq", "geqslant", "geqq"], "ge"),
    **dict.fromkeys(["cdots", "dots", "dotsc", "dotsb", "dotso", "dotsm", "hdots"], "ldots"),
    **dict.fromkeys(["degree", "degrees", "textdegree"], "circ"),
    **{"neq": "ne", "varnothing": "emptyset", "lbrace": "{", "rbrace": "}", "varphi": "phi", "varepsilon": "epsilon"},
    **{"ast": "cdot", "mod": "bmod"},
}
SIGN_OF_COMMAND = {
    **dict.fromkeys(["lvert", "rvert", "vert", "mid"], "|"),
    **{"AA": "Å", "div": "/", "langle": "(", "rangle": ")", "colon": ":"},
}
DEGREE = re.compile(
    r"(?<!\^)(?<!\^[ {])(?<!\^\{ )\\(?:degrees?|textdegree)(?![A-Za-z])|\\text\{\s*°\s*\}"
    r"|(?<=\d\d)\^(?:o(?![a-z])|\{o\})"
)
COMMAND = re.compile(r"\\([A-Za-z]+)(?![A-Za-z])[ \t]*")
# Formatting that a reader does not see, or that does not change the value.
REMOVED = re.compile(
    r"\\(?:left|right|[bB]ig+[lrm]?)(?![A-Za-z])(?:\s*\.(?!\d))?"
    r"|\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|quad|qquad|hspace\*?\{[^{}]*\}|vspace\*?\{[^{}]*\}|phantom\{[^{}]*\}|tag\*?\{[^{}]*\}|label\{[^{}]*\}|color\{[^{}]*\}|bf|rm|it|sf|large|Large"
    r"|normalsize|boldmath|null|blacksquare|square|Box|qed|checkmark|em)(?![A-Za-z])"
)
SPACE = re.compile(r"(?<!\\)\\[,;:>! ]|~|\\thinspace(?![A-Za-z])|[\s\u00a0\u2000-\u200a\u202f\u205f\u3000]+")
ROW_GAP = re.compile(r"\\\\\s*\[-?[0-9.]{1,9} ?(?:pt|em|ex|mm|cm)\]")
STYLED = re.compile(
    r"\\(?:textcolor\s*\{[^{}]*\}|colorbox\s*\{[^{}]*\}|boldsymbol|pmb|bm|underline|uline|underbar|boxed|fbox|ensuremath"
    r"|mathit|mathnormal|mathsf|mathtt|mathcal|mathscr|emph|textit|textsl|small|mathop|mathord|mathrel|mathbin"
    r"|displaylines)\s*(?=\{)"
)
WORDS = re.compile(r"\\(?:text(?:bf|rm|sf|tt|normal|up|md)?|mbox|hbox|textup)\s*\{")
LETTERS = re.compile(r"\\(?:mathrm|mathbf|operatorname\*?|rm|bf)\s*\{")
LONGEST = 4000  # characters of what is changed at all
DEEPEST = 10  # braces around all of an answer
# "for all x", which restricts nothing; "for all x > 0" does.
QUANTIFIER = re.compile(
    r"(?:[\s,]*(?:\\forall|\\text\{[\s,]*(?:for|where)\s(?:all|any|every|each)\b)|(?<=\S)\s+for (?:all|any|every)\b)"
    r"(?![^<>=]*(?:odd|even|prime|positive|negative|\\notin))[^<>=]{0,60}$"
)
# Before a number.
CURRENCY = re.compile(r"^(?:\\text\{ ?)?(USD|EUR|GBP|INR|Rs|\\pounds|\\euro|[€£¥₹₩])\.? ?\}? ?(?=\d)")
CURRENCY_SIGNS = {"USD": r"\dollar ", "EUR": "€", r"\euro": "€", "GBP": "£", r"\pounds": "£", "INR": "₹", "Rs": "₹"}
ALL_REALS = re.compile(r"(?:\\text\{ ?)?(?:the )?(?:set of )?all real(?: number)?s? ?\}?", re.IGNORECASE)
WORD = r"\\(?:text|mathrm)\{"
LABEL = rf"{WORD}\s*\(?\s*[A-J]\s*[).:]?\s*\}}|\((?:[A-J]|{WORD}\s*[A-J]\s*\}})\)"
# "(C) 7", "\text{(C) } 7", "C. 7"
AFTER_LABEL = r"\s+(?![-+*/=^_]|\\cdot|\\times)|(?=\d|\\(?:frac|sqrt|text))"
LABELLED = re.compile(rf"(?:{LABEL}|[A-J][).:])(?:{AFTER_LABEL})|{WORD}\s*\([A-J]\)\s*\}}")
QUOTED = re.compile(r"^(?:[\"“]|``)([^\"“”`']+)(?:[\"”]|'')$")
ONLY_LABEL = re.compile(rf"{LABEL}|[A-J]\)")
PRODUCT = re.compile(r"\\(?:text|mathrm)\{[^{}\\]*(?:\\cdot [^{}\\]*)+\}")  # \text{N\cdot m}, of units
NUMBER_WORDS = {"zero": 0, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8} | {
    **{"nine": 9, "ten": 10, "eleven": 11, "twelve": 12, "thirteen": 13, "fourteen": 14, "fifteen": 15, "sixteen": 16},
    **{"seventeen": 17, "eighteen": 18, "nineteen": 19, "twenty": 20},
}
INTRODUCED = re.compile(
    r"(?:\\text\{\s*)?(?:the\s+)?(?:final\s+|correct\s+)?(?:answer|ans|result|solution|choice|option)"
    r"(?:\s+is)?\s*[:=]?\s*\}?\s*"
    r"(?=[^a-z\s}]|[a-j](?![a-z]))",
    re.IGNORECASE,
)


@lru_cache(maxsize=1024)  # a reference comes with each of its responses, and an answer again, to be named
def normal_form(text: str) -> str:
    r"""`text` with Unicode signs as LaTeX, one command for each meaning (`\frac` for `\dfrac`), and without formatting,
    delimiters of mathematics and marks at the end. Words are in `\text{}`, and single spaces stay."""
    if len(text) > LONGEST:
        return text
    text = DEGREE.sub("°", text)
    text = VULGAR.sub(_vulgar, QUOTED.sub(r"\1", text.strip().strip("*`").strip()))
    text = RAISED.sub(lambda run: f"^{{{run[0].translate(SUPERSCRIPTS)}}}", text)
    text = LOWERED.sub(lambda run: f"_{{{run[0].translate(SUBSCRIPTS)}}}", text)
    text = "".join(SIGNS.get(sign, sign) for sign in text)
    if not text.isascii():
        text = "".join(SIGNS[sign] if sign in SIGNS else _ascii(sign) for sign in unicodedata.normalize("NFKC", text))
    text = re.sub(r"(?:\\!)?,\\!\s*|\\!,|(?<=\d)\\,(?=\d{3}(?!\d))", "{,}", ROW_GAP.sub(r"\\\\", text))
    text = LETTERS.sub(r"\\mathrm{", WORDS.sub(r"\\text{", STYLED.sub("", text)))
    text = re.sub(r"\\[dt]?frac ?\{\\text\{([^{}\\]+)\}\} ?\{\\text\{([^{}\\]+)\}\}", r"\\text{ \1/\2}", text)
    text = PRODUCT.sub(lambda found: found[0].replace("\\cdot ", "}\\cdot \\text{"), text)
    text = re.sub(r"\\(?:text|mathrm)(?=\{[^{}]*(?:\{|\\[A-Za-z]))", "", text)  # \mathbf{\frac{1}{2}}
    text = re.sub(r"\\mathrm\{\s*(?:\\?~|\\,|\\ )", r"\\text{ ", text)  # Minerva's 5 \mathrm{~cm}
    text = SPACE.sub(" ", REMOVED.sub(" ", text))
    text = re.sub(
        r"\^ ?(?:\\circ|\{ ?\\circ ?\}) ?(?:\\(?:text|mathrm)\{ ?([CF]) ?\}|([CF])(?= ?\}?$))", _temperature, text
    )
    text = COMMAND.sub(_same_command, text)
    for written, meant in (("\\| ", "|"), ("{:}", ":"), ("\\text {", "\\text{"), ("\\mathrm {", "\\mathrm{")):
        text = text.replace(written, meant)
    text = re.sub(r"\^\s*\{\s*(?:\\prime\s*)+\}|\^\s*\\prime", lambda found: "'" * found[0].count("prime"), text)
    text = re.sub(r"\^\s*\{\s*\\circ\s*\}", r"^\\circ ", text)
    text = re.sub(r"(?<!\\)\\[()\[\]]", " ", text)  # the delimiters \( \) \[ \]
    text = re.sub(r"\\text\{([^{}]*\d:\d\d[^{}]*)\}", r"\1", text)
    text = re.sub(r"\\text\{[\s.,;:]*\}", " ", re.sub(r"\.{3,}", r"\\ldots ", text))
    text = text.replace("\\$", "\\dollar ").replace("$", " ").replace("\\%", "%").replace("**", "^")
    text = trimmed(QUANTIFIER.sub("", re.sub(r" +", " ", text)))
    text = CURRENCY.sub(lambda found: CURRENCY_SIGNS.get(found[1], found[1]), text)
    if (word := re.sub(r"^\\text\{(.*)\}$", r"\1", text).strip().lower()) in NUMBER_WORDS:
        return str(NUMBER_WORDS[word])
    return r"\mathbb{R}" if ALL_REALS.fullmatch(text) else text


def trimmed(text: str) -> str:
    """`text` without marks and spaces at its ends, and without braces around all of it."""
    for _ in range(DEEPEST):
        text = re.sub(r"(?<=[A-Za-z0-9])[.,;:]+\s*\}$", "}", text.strip(" *`"))
        text = text.rstrip(".,;: \\").lstrip(",;:= ").removeprefix("\\approx ")
        if not (text.startswith("{") and text.endswith("}") and _one_group(text)):
            break
        text = text[1:-1]
    return text


def same_text(first: str, second: str) -> bool:
    """Whether two normal forms are one text, up to spaces and braces; up to case where they are in words."""
    mine, other = _bare(first), _bare(second)
    if mine == other or (in_words(first) and mine.casefold() == other.casefold()):
        return True
    return mine.count("=") == 1 and mine.split("=") == other.split("=")[::-1]


def in_words(text: str) -> bool:
    """Whether a normal form is words only: "even" is no product. Short words count in `\\text{}`."""
    words = re.sub(r"\\(?:text|mathrm)\{([^{}]*)\}", r"\1", text)
    long = r"[^\W\d_]{4,}|\b(?:yes|no|odd|all|one|two|six|ten|none)\b"
    plain = re.fullmatch(r"[^\W\d_][^\d\\_^={}+*/<>|()\[\]]*", words)
    return bool(plain and (re.search(long, words, re.IGNORECASE) or re.search(r"\\text\{[^{}]{2,}\}", text)))


def label_of(text: str) -> tuple[str | None, str]:
    r"""(letter, rest) of a choice: ("C", "7") of `\text{(C) } 7`, ("C", "") of `(C)`, (None, text) without a letter."""
    found = ONLY_LABEL.fullmatch(text) or LABELLED.match(text)
    if found is None:
        return None, text
    return re.search("[A-J]", found[0])[0], trimmed(text[found.end() :])


def without_introduction(text: str) -> str:
    r"""`text` without "Answer:" or `\text{Answer: }` at its beginning."""
    found = INTRODUCED.match(text)
    return trimmed(text[found.end() :]) if found else text


def _bare(text: str) -> str:
    text = re.sub(r"\\(?:text|mathrm)\{([^{}]*)\}", r"\1", text)
    if re.fullmatch(r"[A-Za-z0-9 ,.'-]+", text):  # June 6
        text = re.sub(r"\b[A-Z]?[a-z]{3,}\b", lambda word: word[0].lower(), text)
    text = re.sub(r"(?<![0-9,]) | (?![0-9])", "", text)
    text = re.sub(r"(?<![A-Za-z])\{([^{}\\])\}", r"\1", text)  # x^{2}
    return re.sub(r"\\frac(?:\{([^{}])\}|([0-9]))(?:\{([^{}])\}|([0-9]))", r"\\frac\1\2\3\4", text)


def _temperature(found: re.Match[str]) -> str:
    return r"\text{ degrees Celsius}" if "C" in found.groups() else r"\text{ degrees Fahrenheit}"


def _vulgar(found: re.Match[str]) -> str:
    top, _, bottom = unicodedata.normalize("NFKC", found[0]).partition("⁄")
    return f"\\frac{{{top}}}{{{bottom}}}" if bottom else found[0]


def _same_command(found: re.Match[str]) -> str:
    return SIGN_OF_COMMAND.get(found[1]) or f"\\{SAME_COMMAND.get(found[1], found[1])} "


def _ascii(sign: str) -> str:
    """Digits of all scripts, and Greek letters as commands."""
    if sign.isdecimal():
        return str(unicodedata.digit(sign))
    greek = re.match(r"GREEK (SMALL LETTER |CAPITAL LETTER |)(?:FINAL |LUNATE )?([A-Z]+)", unicodedata.name(sign, ""))
    if greek is None:
        return sign
    name = greek[2].replace("LAMDA", "LAMBDA")
    return f"\\{name.capitalize() if greek[1].startswith('C') else name.lower()} "


def _one_group(text: str) -> bool:
    depth = 0
    for place, sign in enumerate(text):
        if sign in "{}" and text[place - 1 : place] != "\\":
            depth += 1 if sign == "{" else -1
        if depth == 0 and place < len(text) - 1:
            return False
    return depth == 0
