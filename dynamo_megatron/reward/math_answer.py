"""The built-in reward `math`: is the response's final answer mathematically equal to the prompt's?"""

from __future__ import annotations

import contextlib
import json
import re
from decimal import Decimal
from functools import lru_cache
from typing import Any

from dynamo_megatron.reward.extraction import SENTENCE_END, Graded, after_thinking, boxed, last_boxes, last_line
from dynamo_megatron.reward.mathematics.equality import equal
from dynamo_megatron.reward.mathematics.parser import parse
from dynamo_megatron.reward.mathematics.text import in_words, label_of, normal_form, same_text, without_introduction
from dynamo_megatron.reward.mathematics.tokens import MAGNITUDES, NO_UNIT, NotMathematics, is_larger, is_unit
from dynamo_megatron.reward.mathematics.value import Node
from dynamo_megatron.types import Prompt

# Spans of bounded length, so that opening marks without a closing one do not cost a quadratic search.
# "$5 - $2 = $3" has no span: no digit follows a closing mark, and no blank is before it if a digit follows the opening.
LATEX = re.compile(
    r"\$\$(.{1,1000}?)\$\$|\$((?!\d)[^$\n]{1,1000}|\d[^$\n]{0,999}(?<!\s))\$(?!\d)"
    r"|\\\((.{1,1000}?)\\\)|\\\[(.{1,1000}?)\\\]",
    re.DOTALL,
)
# One word: "#### Step 1: add" is a heading, not an answer.
MARKED = re.compile(r"^####[ \t]*(\S{0,200}[\d\\]\S{0,200})[ \t]*$", re.MULTILINE)
TAGGED = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL)
# "The final answer is", "Answer:", and the same in the languages that models answer in.
ANSWER = re.compile(
    r"\b(?:answers?|solution|result)\b[^\n.:=]{0,60}?(?:\b(?:is|are|equals|be)\b\s*:?|[:=])\**"
    r"|\bcorrect (?:option|choice) is\b(?=\W{0,9}[A-J]\b)"
    r"|\banswer\W*\n|答案|故选|所以选|答[:：]|答え|解答|정답|답은|답[:：]"
    r"|\b(?:respuesta|resposta|risposta|réponse|antwort|antwoord|odpowiedź|cevap|svar)\b"
    r"|ответ|đáp án|kết quả|คำตอบ|उत्तर|الجواب|الإجابة|απάντηση",
    re.IGNORECASE,
)
LEADING = re.compile(r"^(?:\s|\*|:|：|is\b|es\b|est\b|ist\b|lautet\b|是|为|為|は|는|은|이|é\b|è\b|là\b|=|-(?=\s)|—)+")
REASON = re.compile(r"[\s,]+(?:not|because|since|rather|instead|which|where|so|as)\b|[,而]?不是")
# Words beside a number that make it another one, or no answer at all; of the first ones not "the larger one is 7".
NO_VERB = r"(?:(?!\b(?:is|are|was|were|equals?)\b)[^.,;:!?\n]){0,30}$"
REFUSED_BEFORE = re.compile(
    r"\b(?:(?:root|square|multiple) of|(?:less|more|fewer|greater|larger|smaller) than)\s"
    r"(?![$\d])[^.,;:!?\n]{0,30}$"
    rf"|\b(?:root|square|less|more|fewer|greater|larger|smaller|above|below|multiple|negative|minus|plus|times|over"
    rf"|power|raised|mod|modulo|inverse|reciprocal|divided)\b{NO_VERB}"
    r"|(?:\b(?:not|never|cannot|either|or|maybe|possibly|except|but|reject|rejected"
    r"|(?:half|twice|double|triple)(?! (?:of )?\$?\d))\b|n['’]t\b|不|非)[^.,;:!?\n]{0,30}$"
    r"|\bbetween(?: \S{1,20} and)?$|\bat (?:least|most)$"
    r"|(?:^|[.:,\n]|\b(?:we|now|next|then|first|finally))\W{0,9}(?:add|subtract|multiply|divide)\b"
    r"(?:(?!\b(?:get|gives?|giving|is|equals|to|yield|leav|obtain|find|have|total)(?:s|es|ing|e)?\b)[^.=:→\n]){0,40}$",
    re.IGNORECASE,
)
HARMLESS = "and|at|by|of|the|to|or|more|less|per(?! ?(?:cent|mil))|(?:thous|mill|bill|trill)(?:and|ion)|hundred|dozen"
REFUSED_AFTER = re.compile(
    r"[\s$]{0,3}(?:(?:is|are) (?:not|no|wrong|incorrect|false)\b"
    rf"|(?!(?:{HARMLESS})\b|times[!*)\s]*\.?[*\s]*\Z)(?:{NO_UNIT.pattern})\b)",
    re.IGNORECASE,
)
UNSURE = re.compile(
    rf"(?:\bnot\b|n['’]t\b){NO_VERB}"
    r"|(?:\bnot\b|n['’]t\b)[^.,;:!?\n]{0,20}\b(?:think|believe|say|know|sure|certain|true|case)\b[^.,;:!?\n]{0,30}$"
    r"|(?:\b(?:never|cannot|either|or|maybe|possibly|except|but|reject|rejected)\b|不|非)[^.,;:!?\n]{0,30}$"
    r"|\b(?:half|twice|double|triple) (?:of )?$",
    re.IGNORECASE,
)  # of REFUSED_BEFORE what makes the result of a calculation no answer
RESULT = re.compile(r".[^=]*[-+−–*/×÷^][^=]*=")
# Than something else, by that result; or its unit.
MORE = re.compile(
    r"[\s$]{0,3}(?:over|above|below|percent|times(?=\W*$|\s(?:as|more|larger|greater|bigger|faster|older|longer)\b))\b",
    re.IGNORECASE,
)
# After a number: "109 years old 10 years from now".
AGO = re.compile(
    r"(\d(?:\s(?:year|month|week|day|hour|minute)s?)?(?:\sold)?)\s(?:in\s)?\d{1,4} "
    r"(?:year|month|week|day|hour|minute)s? (?:ago|from now|later|earlier)\W{0,9}$"
)
HEDGED = re.compile(
    r"\b(?:at least|at most|about|around|approximately|could|might|may|possibl[ey]|or)\b", re.IGNORECASE
)
TIMES = re.compile(r"(?<=[\d)%])(?:\s*[xX]\s*(?=\.?\d)|\s+[xX]\s+(?=\())")  # 30 x 4
AFTER_RESULT = re.compile(
    r"[^.,;!?\n]*\b(?:in|for|after|to(?=\s+[^\W\d])|every|during|the|his|her|their|its|those|these|each|all|only|per)"
    r"(?:\s+(?!(?:and|so|then|is|are|was|has|have|had|equals?|equal|total|leaves?|leaving)\b)[^\W\d]+){0,2}\s*\Z"
)
STATED = re.compile(r"\*\*[^*\n]{0,40}\d[^*\n]{0,40}(?<!:)\*\*(?!:)")
GIVEN = re.compile(
    r"\b(?:(?<!left )with|the|th[eo]se|this|his|her|their|its|of|at|each|from|in|after|by|per|to|than|every)\W*\Z",
    re.IGNORECASE,
)
TOTAL = re.compile(r"\btotal of\W*\Z", re.IGNORECASE)
EQUALS = re.compile(r"=\s*(\$?\d[\d,]*+(?:\.\d+)?+)(?!\s*[-+*/×÷=])")
CLOCK = re.compile(r"(\d{1,2}:\d\d)\s?[ap]\.?m\b\.?", re.IGNORECASE)
# Before a number: "5 hours and" 30 minutes
QUANTITY = re.compile(r"(?<![\w.,])(\d[\d.,]* ([^\W\d_]+)),?(?: and)? \Z")
IN_CALCULATION = re.compile(r"[-+−–*/×÷=]\s*$")
# "160 minutes (2 hours and 40 minutes).", "13, attained at x = 3", the end mark of a proof
REMARK = re.compile(
    r"\s\([^()\\]*[A-Za-z]{3,}[^()\\]*\)\s*[.!]?\s*$|(?:\$?\\(?:blacksquare|square|Box|qed)\$?|∎)\s*$"
    r"|(?<=[\d$})%a-z])\sfor (?:all|any|every)\s+(?:(?:real|positive|integers?|numbers?|natural)\s+){0,3}"
    r"\$?\(?[A-Za-z]\b(?!\s+[a-z])[^.\n]{0,100}\.?\s{0,9}$"
    r"|(?<=[\d$}%])(?:\s[A-Za-z ]{0,20})?,\s+(?:attained|achieved|reached|obtained|when|where|since|because"
    r"|(?:or|which is) (?:about|approximately|roughly)|(?:which is )?\$?\d[\d.,]* (?:more|less|fewer)(?= than|\W*$)"
    r"|with(?=[^,\n]{0,40}\b(?:left|remaining|to spare)\b))\b[^\n]{0,200}$|\s\(\d+(?:\s?[-+*/×]\s?\d+)+\)\W{0,9}$"
)
# What follows an answer and is none: the next problem of a base model, a check.
NEXT_PROBLEM = re.compile(r"\n\s{0,9}(?:question|problem|q)\s*(?:\d+\s*)?:", re.IGNORECASE)
CHECK = re.compile(
    r"\n\W{0,9}(?:verification|check|breakdown|here['’]s the breakdown)\b"
    r"|[.\n]\W{0,9}(?:we can|let['’]s|to) (?:check|verify)\b"
    r"|[.\n]\W{0,9}(?:let(?:['’]s| me| us)|I(?:['’]ll| will)) (?:now )?(?:double[- ]?)?(?:check|verify)"
    r"(?:[:.!]|\s(?:this|that|it|our|my|the (?:answer|result|solution))\b)",
    re.IGNORECASE,
)
CONCLUDES = re.compile(r"(?:^|[.!?\n])\s{0,9}(?:so|thus|hence|therefore|total)\b[^.\n]{0,200}\d", re.IGNORECASE)
CORRECTION = re.compile(r"(?:^|[.!?\n])\W{0,9}(?:wait|hold on|oops|hmm+|actually|correction|sorry)\b", re.IGNORECASE)
RETRACTED = re.compile(
    r"\A\W{0,9}no[,.:;—–](?!\s+(?:that|it|this)\b.{0,9}\b(?:right|correct|fine))"
    r"|(?:\bnot|n['’]t) (?:right|correct)\b|(?<!can['’]t be )\b(?:wrong|incorrect|forgot|should be"
    r"|(?:made|was|is|my|['’]s|see|found) (?:(?:a|an|my|the)(?: \w+)? )?(?:mistake|error))\b",
    re.IGNORECASE,
)
# An expression in the middle of a sentence: numbers, single letters and commands with signs between them.
ATOM = (
    r"(?:\\[A-Za-z]+(?:\{[^{}\n]{0,200}\}){0,2}|(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?(?:[eE][-+]?\d+\b)?|\.\d+"
    r"|[√∛∞πθ½⅓⅔¼¾⅕-⅞]|\b(?:pi|sqrt|sin|cos|tan|ln|log|exp)\b|(?<![A-Za-z'’])[A-Za-z](?![A-Za-z'’])"
    r"|[(\[{][^()\[\]{}\n]{1,200}[)\]}]|[°²³⁴⁵⁶⁷⁸⁹⁰¹⁻!%])"
)
RUN = re.compile(
    rf"(?:[-+−–](?=[\d.(√π\\]))?{ATOM}(?:[ \t]*(?:[-+−–*/^=×·⋅÷±]|\*\*)[ \t]*[-−+]?{ATOM}|:(?=\d){ATOM}|[ \t]?{ATOM})*"
)
OF_ASDIV = re.compile(r"^\s*(-?[\d.,/]+)\s*\(([A-Za-z][A-Za-z ]*)\)\s*$")  # 9 (apples)
BOLD_MARK = re.compile(r"(?:^|(?<=[\s(]))\*\*(?=\S)|(?<=\S)\*\*(?=[\s.,;:!?)]|$)")  # and no power
BOLD = re.compile(r"([^*]*\b(?:is|are):?\s)\*\*([^*]{1,100})\*\*[^*]*")  # the only words in bold of a line
DOUBTED = re.compile(
    r"\b(?:not|no|none|never|neither|either|or|false|opposite|whether|if|doubt|unclear|suppose|assume|except|cannot"
    r"|could|might|may|maybe|perhaps|possibl[ey])\b|n['’]t\b",
    re.IGNORECASE,
)
SUM = re.compile(r"[\d.,]+(?:\s*[-+−*×·÷]\s*[\d.,]+)+")  # of plain numbers
JOINED = re.compile(r"\s*(?:,\s*)?(and|or|,)\s*|\s*,\s*()")
UNIT_AFTER = re.compile(r"\s?([^\W\d_]{2,}\b|[A-Za-z](?=[.,;]|\s*$))")
UNIT_LAST = re.compile(r"(.*?[\d}$)⁰¹²³⁴-⁹])\s*([^\W\d_]+(?:/[^\W\d_]+|\s+per\s+[^\W\d_]+)?)\.?\s*", re.DOTALL)
NUMBERS = re.compile(r"(?<![\w.,])\$?\d[\d,]*(?:\.\d+)?")
LAST_BREAK = re.compile(rf"(?:{SENTENCE_END.pattern}|\n)\s*")
ARTICLE = re.compile(r"\sa\Z")
LONGEST = 20_000  # characters at the end of a response that are searched where it has no box
LAST_SENTENCES = 5  # that are tried, of those with "the answer is"
LAST_RUNS = 8  # among which the result of a calculation is looked for
SEVERAL = re.compile(r"\([A-J]\)|\b(?:and|or|not)\b|[,;] ?[A-J][.:)]")  # after the letter of a choice
LETTER = re.compile("[A-J]")
SIGN = re.compile(r"\s?[-+−–*/×÷^]")
# After a number, up to the end of its sentence, no verb: "of the 108 bottles".
VERB = (
    r"is|are|was|were|gets?|gives?|giving|leav\w+|equals?|mak(?:es?|ing)|so|then|total\w*|ha[sd]|have|will|can|lasts?"
    r"|and|or"
)
ADJUNCT = re.compile(
    rf"(?:\s(?!(?:{VERB}|which|more than|less than|fewer than|times)\b)[^\W\d_]+){{0,4}}"
    r"\s(?:to(?=\s[^\W\d])|of|for|after|by|at|from|in|with|instead of|per)\s"
    rf"(?:(?!\b(?:{VERB})\b)[^,;:!?=\n]){{1,80}}\Z"
)
CLAUSE = re.compile(
    r"(?<!and)(?<!so)(?<!only)(?<![,;])\s(?:if|when)\s(?!and only)"
    r"(?:[^,;:=\n]{1,60}|\$?[A-Za-z] ?= ?[^,;:=\n]{1,30})\Z"
)
HALF = re.compile(r"(?<![\d.,/])(\d+) and a half\b")
RAISED = re.compile(
    r"(\d ?(?:[cdkm]m|in|ft|yd|mi|miles|units|inches|feet|meters|[a-zA-Z]{1,2}/(?:s|h|min)))\^\{?([23])\b"
)
EMPTY_BOX = re.compile(r"\\boxed\s*\{\s*\}")
DIGIT = re.compile(r"[\d∞π½⅓⅔¼¾⅕-⅞]|\\(?:pi|infty|frac|sqrt)")


def math_answer(prompt: Prompt, response: str) -> float:
    r"""1.0 where the final answer of `response` (`final_answers`) equals `prompt.answer`, else 0.0: both have the same
    normal form, or both can be parsed whole and are mathematically equal. `prompt.answer` is a number or text: plain,
    LaTeX, or a solution that ends in `\boxed{}` or `#### 72`. Raises ValueError for anything else."""
    reference = normal_form(_reference(prompt.answer))
    if not reference:
        raise ValueError(f"the math reward finds nothing to compare in the answer {prompt.answer!r:.200}")
    words = in_words(reference) or _parsed(reference) is None
    choices = [choice for answer in final_answers(response, words) if (choice := normal_form(answer))]
    right = any(equal_answers(reference, choice) for choice in choices)
    return Graded(right, reference if right else next(iter(choices), ""))  # all right answers are one


def equal_answers(reference: str, answer: str) -> bool:
    """Whether two normal forms are equal answers. The letter of a choice may stand before either of them."""
    if same_text(reference, answer):
        return True
    (letter, reference), (chosen, answer) = label_of(reference), label_of(without_introduction(answer))
    if chosen and LETTER.fullmatch(reference):
        letter, reference = reference, ""  # the label decides, not what stands behind it
    if (letter and chosen and letter != chosen) or (chosen and SEVERAL.search(answer)):
        return False
    if (letter or reference) == (chosen or answer) and not (letter and chosen and reference and answer):
        return True
    if not reference or not answer:
        return same_text(reference or letter or "", answer or chosen or "")
    if same_text(reference, answer):
        return True
    if in_words(reference):
        return False
    parsed = _parsed(reference)
    given = _parsed_answer(answer)
    try:
        return parsed is not None and given is not None and equal(parsed, given)
    except RecursionError:
        return False


def final_answers(response: str, words: bool = False) -> list[str]:
    """The final answer of a response, as docs/rewards.md says; empty where there is none. Without a box or line, where
    the reference is in `words`, the last line, or the last LaTeX span in it. Several boxes in one sentence are a list,
    and the last of them."""
    text = after_thinking(response)
    if text is None:
        return []
    tagged = TAGGED.findall(text)
    if tagged:
        text = tagged[-1]
    text = HALF.sub(r"\1.5", _own_part(text))
    marked = list(MARKED.finditer(text))
    found = last_boxes(text[marked[-1].start() :] if marked else text)
    if len(found) > 1 and label_of(normal_form(found[0]))[0]:
        return found[-1:]  # the label of the first box is none of the list
    if found or (not marked and boxed(text)):
        return found
    if marked:
        return [marked[-1][1]]
    if tagged:
        if words or _parsed(normal_form(text)) is not None:
            return _readings(text)
        if len(NUMBERS.findall(text)) > 1 or HEDGED.search(text):  # a sentence with one number
            return [text]
    return _unmarked(text.replace("\\$", "\\dollar "), words)


def _own_part(text: str) -> str:
    """`text` without another problem that follows a marked answer, without a check that no marked answer follows, and
    without what a correction takes back."""
    if (problem := NEXT_PROBLEM.search(text)) and _marks(text[: problem.start()]):
        text = text[: problem.start()]
    if (check := CHECK.search(text)) and DIGIT.search(text[: check.start()]):
        after = text[check.end() :]
        if not _marks(after) and not CONCLUDES.search(after):
            text = text[: check.start()]
    for correction in list(CORRECTION.finditer(text))[-1:]:
        rest = text[correction.end() :]
        if RETRACTED.search(rest) or boxed(rest) or MARKED.search(rest) or _named(rest, words=False, whole=True):
            text = rest
    return text


def _marks(text: str) -> bool:
    """Whether it has a box, a line with #### or a sentence that names the answer."""
    return bool(boxed(text) or MARKED.search(text) or ANSWER.search(text))


def _named(text: str, words: bool, whole: bool = False) -> list[str]:
    """What the last sentence that names an answer gives; with `whole` only where it gives nothing else."""
    for found in reversed(list(ANSWER.finditer(text))[-LAST_SENTENCES:]):
        rest = LEADING.sub("", text[found.end() : found.end() + 2000])
        display = re.match(r"(?:\\\[|\$\$)(.{1,1000}?)(?:\\\]|\$\$)", rest, re.DOTALL)
        sentence = display[1] if display else SENTENCE_END.split(rest.partition("\n")[0], maxsplit=1)[0]
        if not words:
            sentence = REASON.split(sentence, maxsplit=1)[0]
        if not sentence.strip():
            continue
        if words or _parsed(form := normal_form(sentence)) is not None or label_of(form)[0]:
            return _readings(sentence)
        if not whole and (expressions := last_expressions(sentence)):
            return expressions
    return []


def _unmarked(text: str, words: bool) -> list[str]:
    if named := _named(text, words):
        return named
    if EMPTY_BOX.search(text):
        return []
    if words:
        line = last_line(text)
        form, spans = normal_form(line), [next(filter(None, span.groups())) for span in list(LATEX.finditer(line))[-1:]]
        bold = BOLD.fullmatch(line)
        alone = bold and not DOUBTED.search(bold[1]) and not LATEX.search(line, bold.end(2))
        marked = [bold[2]] if alone else [*spans, *last_expressions(line)]
        # What the line's normal form has lost would be a second answer beside it.
        lost = any(in_words(other := normal_form(each)) and other not in form for each in marked)
        return marked if lost else [line, *marked]
    return last_expressions(text)


def last_expressions(text: str) -> list[str]:
    """The last LaTeX span or expression with a number, whichever comes later, with a unit after it. Of spans with only
    "and", "or" or a comma between them the list, and the last one unless that `_is_list`."""
    text = _until_stated(REMARK.sub("", text[-LONGEST:]))
    spans = list(LATEX.finditer(text))
    end = spans[-1].end() if spans else 0
    found = _last_run(text[end:])
    if found or not spans:
        return found
    first, joints = _list_start(text, spans)
    if refused(text, spans[first]):
        return []
    listed = [next(filter(None, span.groups())) for span in spans[first:]]
    last = listed[-1]
    if _parsed_answer(normal_form(last)) is None:
        last = (_last_run(last) or [last])[0]
    if (unit := UNIT_AFTER.match(text, end)) and is_unit(unit[1]):
        last = f"{last}\\text{{ {unit[1]}}}"
    return [last] if len(listed) == 1 else [", ".join(listed), *([] if _is_list(listed, joints) else [last])]


def _until_stated(text: str) -> str:
    """`text` without what follows the number that its last sentence states: the only one in bold, of money, that the
    calculation before it gave (24 + 40 = 64. So he pays 64 for the 16 glasses), or beside which the others are given (9
    boxes for the 108 bottles)."""
    start = max((found.end() for found in LAST_BREAK.finditer(text.rstrip(" .!*\n"))), default=0)
    if (clause := CLAUSE.search(text, start)) and DIGIT.search(text, start, clause.start()):
        text = text if "=" in text[start : clause.start()] else text[: clause.start()]
    start = max(start, text.rfind(", ", start) + 1)
    numbers = list(NUMBERS.finditer(text, start))
    if "=" in text[start:] or len(numbers) < 2:
        return text
    bold, money = list(STATED.finditer(text, start)), [number for number in numbers if number[0].startswith("$")]
    result = [_digits(found) for found in EQUALS.findall(text, 0, start)[-1:]]
    same = [number for number in numbers[:-1] if [_digits(number[0])] == result]
    new = [number for number in numbers if not GIVEN.search(text[start : number.start()][-20:])]
    totals = [number for number in same if TOTAL.search(text[start : number.start()][-20:])]
    first = numbers[:1] if ADJUNCT.match(text, numbers[0].end()) else []
    for stated in (bold, money, same, new, first):
        if len(stated) == 1:
            end = stated[0].end()
            told = stated is first or stated is new or AFTER_RESULT.match(text, end, numbers[-1].start())
            return text[:end] if told and stated[0] in [*bold, *new, *totals] and not SIGN.match(text, end) else text
    return text


def _digits(number: str) -> str:
    return number.strip("$,").replace(",", "")


def _list_start(text: str, spans: list[re.Match[str]]) -> tuple[int, set[str]]:
    """The number of the first of the last `spans` that have only commas, "and" or "or" between them, and which."""
    first, joints = len(spans) - 1, set()
    while first > 0 and (joined := JOINED.fullmatch(text, spans[first - 1].end(), spans[first].start())):
        first, joints = first - 1, joints | {joined[1]}
    return first, joints


def _is_list(members: list[str], joints: set[str]) -> bool:
    """Whether the last one alone is no answer: "x = 1 and x = 5" is not 5, while "a = 2 and a + b = 5" may be."""
    lefts = [member.rpartition("=")[0].strip() for member in members]
    return "or" in joints or ("and" in joints and lefts[-1] in lefts[:-1] and len(set(members)) > 1)


def _last_run(text: str) -> list[str]:
    """The readings of the last expression with a number; none where words beside it refuse it."""
    text = RAISED.sub(lambda found: found[1] + "²³"[int(found[2]) - 2], text)
    text = AGO.sub(r"\1", TIMES.sub(" * ", re.sub(r"\$(?=\.?\d)", "", BOLD_MARK.sub("", text))))
    runs = [run for run in RUN.finditer(text) if DIGIT.search(run[0])]
    if not runs:
        return []
    results = [run for run in runs[-LAST_RUNS:] if RESULT.match(run[0]) or _in_calculation(text, run)]
    if results and AFTER_RESULT.match(text, results[-1].end(), runs[-1].start()):
        runs = results  # 140 * 5 = 700 in 5 minutes
    elif not results:
        first, joints = _list_start(text, runs)
        listed = [run[0].strip() for run in runs[first:]]
        # "a is 6, and 36 is b" has no list; "3, 5, and 7" is one.
        apart = len(listed) == 2 and "," in text[runs[first].end() : runs[-1].start()]
        if "and" in joints and not apart and _is_list(listed, joints):
            return [] if refused(text, runs[first]) else [", ".join(listed)]
    span = runs[-1]
    run, rest = span[0].strip(), text[span.end() :]
    if not results or span is not results[-1]:
        if refused(text, span):
            return []
    else:
        unsure = UNSURE.search(text[max(0, span.start() - 50) : span.start()])
        if unsure or (REFUSED_AFTER.match(rest) and not MORE.match(rest)):
            return []
        if _in_calculation(text, span) or _parsed_answer(normal_form(run)) is None:
            run = run.rpartition("=")[2].strip()  # 48 cm * 2/3 = 32
    if SUM.fullmatch(run):
        return []  # it was not worked out
    if clock := CLOCK.match(text, span.start()):
        return [clock[0], clock[1]]
    if not (after := re.match(r"\s?([^\W\d_]+(?:/[^\W\d_]+|\s+per\s+[^\W\d_]+)?)\b", rest)):
        return _readings(run)
    if after[1].lower() in MAGNITUDES and _parsed(normal_form(run + after[0])) is not None:
        return [run + after[0]]
    if (larger := QUANTITY.search(text[: span.start()])) and is_larger(larger[2], after[1]):
        return [f"{larger[1]} {run} {after[1]}"]
    if article := ARTICLE.search(run):  # 104 a day
        return [run[: article.start()]]
    no_inch = after[1] == "in" and re.match(r"\s*\w", rest[after.end() :])  # 104 in total
    return [run] if no_inch else _readings(f"{run} {after[1]}") if _is_unit(after[1]) else _readings(run)


def _in_calculation(text: str, span: re.Match[str]) -> bool:
    return bool(IN_CALCULATION.search(text[max(0, span.start() - 3) : span.start()]))


def _readings(text: str) -> list[str]:
    """`text`, and before it `text` with a unit for its last word where that may be one: "12 m" is 12 metres, or 12
    times m."""
    found = UNIT_LAST.fullmatch(text)
    if found is None or found[2].lower() in MAGNITUDES or not _is_unit(found[2]):
        return [text]
    return [f"{found[1]}\\text{{ {found[2]}}}", text]


def _is_unit(words: str) -> bool:
    """Of km/h and kilometers per hour, too."""
    return all(map(is_unit, re.split(r"/|\s+per\s+", words)))


def refused(text: str, span: re.Match[str]) -> bool:
    """Whether the words beside a number say that it is not the answer: "not 7", "at least 7", "6 or 7", "7 tenths"."""
    before = text[max(0, span.start() - 50) : span.start()].rstrip(" $*(\\")
    return bool(
        REFUSED_BEFORE.search(before) or before.endswith(("<", ">", "≤", "≥")) or REFUSED_AFTER.match(text, span.end())
    )


@lru_cache(maxsize=1024)  # a reference is parsed for each of its responses
def _parsed(text: str) -> Node | None:
    try:
        return parse(text)
    except (NotMathematics, RecursionError):
        return None


def _parsed_answer(text: str) -> Node | None:
    """A chain x = ... = 3 of which a part in the middle is not understood is x = 3: its steps are no answer."""
    node = _parsed(text)
    if node is None and len(members := re.split(r"=|\\approx ", text)) > 2:
        node = _parsed(f"{members[0]}={members[-1]}")
    return node


def _reference(answer: Any) -> str:
    if isinstance(answer, str) and answer.lstrip().startswith('["'):  # Skywork-OR1 has lists as JSON text
        with contextlib.suppress(ValueError):
            answer = json.loads(answer)
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    if isinstance(answer, float):
        answer = format(Decimal(repr(answer)), "f")
    if not isinstance(answer, str | int) or isinstance(answer, bool) or not str(answer).strip():
        raise ValueError(f"the math reward needs an answer that is text or a number, not {answer!r}")
    text = OF_ASDIV.sub(r"\1 \2", str(answer))
    inside = boxed(text)
    return inside if inside is not None else text.rpartition("####")[2]
