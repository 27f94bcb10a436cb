"""The section `reward`: functions, the processes that they run in, and the settings of those that have any."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from dynamo_megatron.config.method import Positive, Seconds, Section
from dynamo_megatron.runtime.user_code import spec_fault

JUDGE_TEMPLATE = """Judge the response to the problem.

Problem:
{prompt}

Reference answer:
{answer}

Response:
{response}

Give your reasons in a few sentences. Then write "Score: N" on the last line, where N is a number from 0 (useless) to \
10 (correct and complete)."""
NAMES = (
    *("math", "qa_f1", "qa_exact", "qa_sources", "choice", "json_schema", "format", "length", "code", "reasoning_gym"),
    *("judge", "reward_model", "prime"),
)
WITH_SETTINGS = ("format", "length", "code", "prime", "judge", "reward_model")  # in sections of their names
URLS = ("http://", "https://")
# rewards that fail on a row without an answer
COMPARING = frozenset(("math", "qa_f1", "qa_exact", "choice", "json_schema", "code"))


def http_url(url: str) -> str:
    """Raises ValueError for what is none, or has a query."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"{url!r} is no http://HOST:PORT")
    if parts.query or parts.fragment:
        base = parts._replace(query="", fragment="").geturl()
        raise ValueError(f"a path is appended to the URL, so that it cannot have a query; leave {base}")
    return url


def _ascending(value: list[float]) -> list[float]:
    if value[0] >= value[1]:
        raise ValueError(f"{value[0]:g} is not below {value[1]:g}; give the lowest number first")
    return value


def _compiles(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return value


Expression = Annotated[str, AfterValidator(_compiles)]
Url = Annotated[str, AfterValidator(http_url)]
Range = Annotated[list[float], Field(min_length=2, max_length=2), AfterValidator(_ascending)]


class FormatConfig(Section):
    """What a response must look like for the reward `format`."""

    # each once, in this order, nothing outside
    tags: Annotated[list[Annotated[str, Field(pattern=r"^[A-Za-z][\w-]*$")]], Field(min_length=1)] = ["think", "answer"]
    # regular expression of the whole response (. matches line ends); then tags are not used
    pattern: Expression | None = None


class LengthConfig(Section):
    """The reward `length`."""

    words: Positive = 100  # most words that get 1; the reward then falls linearly to 0 at twice as many


class CodeConfig(Section):
    """What the reward `code` gives, and the limits of the programs that it runs."""

    score: Literal["share", "all"] = "share"  # of the tests passed; all: 1 where every test passes, else 0
    tests: Positive | None = None  # the first N of a problem; None: all
    seconds: Seconds = 6.0  # a test; the tests after one that takes longer are not run and count as failed
    cpu_seconds: Annotated[int, Field(ge=1, le=1_000_000)] = 4  # a test
    memory: Annotated[int, Field(ge=64 << 20)] = 1 << 30  # bytes of address space
    python: str | None = None  # interpreter of the programs; None: the trainer's, without any packages


class PrimeConfig(Section):
    """The implicit process reward of PRIME (arXiv 2502.01456), of each response token."""

    # prime: folder of the implicit process reward model, as model.path and of its shape; it is not trained
    model: str | None = None
    reference: str | None = None  # prime: folder of the model that it was trained against; None: model.path
    beta: Annotated[float, Field(gt=0)] = 0.05  # prime: times the log-ratio of the two


class JudgeConfig(Section):
    """The endpoint of the reward `judge`, what it is asked, and how its reply becomes a number."""

    url: Url | None = None  # of an OpenAI-compatible API, as https://HOST/v1; /chat/completions is added
    model: str | None = None  # the endpoint's name of it
    api_key_env: str | None = None  # environment variable with the key sent as Authorization: Bearer
    template: str = JUDGE_TEMPLATE  # what the judge is asked; {prompt}, {response} and {answer} are replaced
    # regular expression; the first group of its last match in the reply is the number
    pattern: Expression = r'(?i)score[\s*_"]*[:\uff1a][\s*_"]*([-+\u2212]?\d*\.?\d+(?:e[-+]?\d+)?)'
    range: Range = [0.0, 10.0]  # lowest and highest number of the judge, which become 0 and 1
    request: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1024}  # further fields of the request
    concurrency: Positive = 32  # requests under way at once

    def faults(self, *, training: bool) -> Iterator[str]:
        if "{response}" not in self.template:
            yield "template: has no {response}: the judge would not see what it scores"
        if not re.compile(self.pattern).groups:
            yield f"pattern: {self.pattern!r} has no group; put the number in parentheses"


class RewardModelConfig(Section):
    """The model of the reward `reward_model`: a sequence classifier with one output, served by SGLang."""

    path: str | None = None  # its Hugging Face folder, for tokenizer and chat template
    urls: list[Url] = []  # its servers (docs/rewards.md)
    api_key_env: str | None = None  # environment variable with their key
    range: Range | None = None  # scores that become 0 and 1, those beyond are cut off; None: the score as it is
    concurrency: Positive = 64  # requests under way at once, of one response each


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


class RewardConfig(Section):
    # math | qa_f1 | qa_exact | qa_sources | choice | json_schema | format | length | code | reasoning_gym | judge |
    # reward_model | prime | module:function | http://
    functions: Annotated[list[str], Field(min_length=1), BeforeValidator(_as_list)] = ["math"]
    fusion: Literal["sum", "mean", "product"] = "sum"
    success_threshold: float = 1.0  # a rollout succeeds where the first function gives at least this
    deadline: Seconds = 10.0  # seconds a sample (services: a request, its repeats included); then reward 0, counted
    on_error: Literal["raise", "zero"] = "raise"
    # processes on rank 0's node; None: a quarter of its cores, at least 2, at most 32
    workers: Annotated[int, Field(ge=1, le=1024)] | None = None
    api_key_env: str | None = None  # http://: environment variable with the key sent as Authorization: Bearer
    format: FormatConfig = FormatConfig()
    length: LengthConfig = LengthConfig()
    code: CodeConfig = CodeConfig()
    judge: JudgeConfig = JudgeConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    prime: PrimeConfig = PrimeConfig()

    @property
    def outcomes(self) -> list[str]:
        """Those of `functions` that a whole response gets a number from."""
        return [name for name in self.functions if name != "prime"]

    @property
    def implicit(self) -> bool:
        """Each response token has an implicit process reward."""
        return "prime" in self.functions

    @field_validator("functions")
    @classmethod
    def _are_known(cls, value: list[str]) -> list[str]:
        if len(set(value)) < len(value):
            raise ValueError(f"a function is named twice in {value}")
        for name in value:
            if name in NAMES or name.startswith(URLS):
                continue
            if ":" not in name:
                near = "".join(f"; did you mean {n}?" for n in difflib.get_close_matches(name, NAMES, 1))
                raise ValueError(
                    f"no built-in {name!r}; give {', '.join(NAMES)}, module:function or an http:// URL{near}"
                )
            if fault := spec_fault(name):
                raise ValueError(fault)
        return value

    def faults(self, *, training: bool) -> Iterator[str]:
        hosts = sorted({urlsplit(name).netloc for name in self.functions if name.startswith(URLS)})
        if self.api_key_env is not None and len(hosts) != 1:
            yield f"api_key_env: the key is for services of one host, and functions has {', '.join(hosts) or 'none'}"
        if self.functions[0] == "prime":
            yield (
                "functions: prime rewards tokens, and whether a rollout succeeds is the first function's to say; name "
                "another one before it, such as [math, prime]"
            )
        if self.implicit and self.prime.model is None:
            yield "prime.model: name the folder of the implicit process reward model (docs/rewards.md)"
        if not self.implicit and self.prime != PrimeConfig():
            yield "prime: is about the reward prime; put it into functions, such as [math, prime]"
        if "judge" in self.functions and (self.judge.url is None or self.judge.model is None):
            yield "judge: name the endpoint's url and the model that it is asked for"
        model, used = self.reward_model, "reward_model" in self.functions
        if used and model.path is None:
            yield "reward_model.path: name the reward model's folder"
        if used and not model.urls:
            yield "reward_model.urls: name its servers (docs/rewards.md)"
        if "code" in self.functions and self.code.seconds >= self.deadline:
            yield (
                f"code.seconds: a test may take {self.code.seconds:g} s and the whole sample {self.deadline:g} s "
                "(reward.deadline); raise the deadline"
            )
