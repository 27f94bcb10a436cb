"""The section `reward`: functions, the processes that they run in, and the settings of those that have any."""

from __future__ import annotations

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from dynamo_megatron.config.method import Positive, Section

Seconds = Annotated[float, Field(gt=0)]
TAG = re.compile(r"[A-Za-z][\w-]*")


class FormatConfig(Section):
    """What a response must look like for the reward `format`."""

    tags: Annotated[list[str], Field(min_length=1)] = ["think", "answer"]  # each once, in this order, nothing outside
    pattern: str | None = None  # regular expression of the whole response (. matches line ends); then tags are not used

    @field_validator("tags")
    @classmethod
    def _are_names(cls, value: list[str]) -> list[str]:
        if wrong := [tag for tag in value if not TAG.fullmatch(tag)]:
            raise ValueError(f"{wrong[0]!r} is no name of a tag; <think> is think")
        if len(set(value)) < len(value):
            raise ValueError("a tag is named twice; a pattern can ask for that")
        return value

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "", re.DOTALL)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        return value


class CodeConfig(Section):
    """What the reward `code` gives, and the limits of the programs that it runs."""

    score: Literal["share", "all"] = "share"  # of the tests passed; all: 1 where every test passes, else 0
    tests: Positive | None = None  # the first N of a problem; None: all
    seconds: Seconds = 6.0  # a test; the tests after one that takes longer are not run and count as failed
    cpu_seconds: Positive = 4  # a test
    memory: Annotated[int, Field(ge=64 << 20)] = 1 << 30  # bytes of address space
    file_size: Positive = 16 << 20  # bytes of all files in the program's temporary folder
    python: str | None = None  # interpreter of the programs; None: the trainer's, without any packages


class PrimeConfig(Section):
    """The implicit process reward of PRIME (arXiv 2502.01456), of each response token."""

    # prime: folder of the implicit process reward model, as model.path and of its shape; it is not trained
    model: str | None = None
    reference: str | None = None  # prime: folder of the model that it was trained against; None: model.path
    beta: Annotated[float, Field(gt=0)] = 0.05  # prime: times the log-ratio of the two


class RewardConfig(Section):
    # math | qa_f1 | qa_exact | choice | format | code | reasoning_gym | prime | module:function | http://
    functions: Annotated[list[str], Field(min_length=1)] = ["math"]
    fusion: Literal["sum", "mean", "product"] = "sum"
    success_threshold: float = 1.0  # a rollout succeeds where the first function gives at least this
    deadline: Seconds = 10.0  # seconds a sample (http://: a request of up to 64); then reward 0, counted
    on_error: Literal["raise", "zero"] = "raise"
    workers: Positive = 2  # processes
    api_key_env: str | None = None  # http://: environment variable with the key sent as Authorization: Bearer
    format: FormatConfig = FormatConfig()
    code: CodeConfig = CodeConfig()
    prime: PrimeConfig = PrimeConfig()

    @property
    def outcomes(self) -> list[str]:
        """Those of `functions` that a whole response gets a number from."""
        return [name for name in self.functions if name != "prime"]

    @property
    def implicit(self) -> bool:
        """Each response token has an implicit process reward."""
        return "prime" in self.functions

    @field_validator("functions", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _key_of_one_host(self) -> RewardConfig:
        hosts = sorted({urlsplit(name).netloc for name in self.functions if name.startswith(("http://", "https://"))})
        if self.api_key_env is not None and len(hosts) != 1:
            raise ValueError(
                f"api_key_env: the key is for services of one host, and functions has {', '.join(hosts) or 'none'}"
            )
        return self

    @model_validator(mode="after")
    def _prime_has_its_models(self) -> RewardConfig:
        if self.functions[0] == "prime":
            raise ValueError(
                "functions: prime rewards tokens, and whether a rollout succeeds is the first function's to say; name "
                "another one before it, such as [math, prime]"
            )
        if self.implicit and self.prime.model is None:
            raise ValueError("prime.model: name the folder of the implicit process reward model (docs/rewards.md)")
        if not self.implicit and self.prime != PrimeConfig():
            raise ValueError("prime: is about the reward prime; put it into functions, such as [math, prime]")
        return self

    @model_validator(mode="after")
    def _a_test_fits(self) -> RewardConfig:
        if "code" in self.functions and self.code.seconds >= self.deadline:
            raise ValueError(
                f"code.seconds: a test may take {self.code.seconds:g} s and the whole sample {self.deadline:g} s "
                "(reward.deadline); raise the deadline"
            )
        return self
