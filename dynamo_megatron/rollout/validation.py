"""What passes for a response of a server. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from dynamo_megatron.runtime.plain_text import on_one_line

ROUNDING = 1e-3  # nats: a logprob may be that much above 0
LOWEST = -3.4e38  # nats: what float32 holds
LARGEST_TOKEN = (1 << 31) - 1

Token = Annotated[int, Field(ge=0, le=LARGEST_TOKEN)]
Version = Annotated[int, Field(ge=-1, le=1 << 62)]
Span = Annotated[tuple[Annotated[Version, Field(strict=True)], Token, Token], Field(strict=False)]


@with_config(ConfigDict(strict=True))
class _Response(TypedDict):
    tokens: Annotated[list[Token], Field(min_length=1)]
    logprobs: list[Annotated[float, Field(ge=LOWEST, le=ROUNDING)]]
    weight_versions: list[Span]
    finish_reason: Literal["stop", "length"]


_RESPONSE = TypeAdapter(_Response)


def response_fault(given: dict[str, Any], *, vocab_size: int, max_new_tokens: int) -> str:
    """Why this is no response that can have been asked for, in a few words; "" where it is one.

    `given`: fields of a Response, whose values may be anything that JSON holds. A response has 1 to `max_new_tokens`
    tokens, which are integers in [0, vocab_size); for each a finite natural logprob, at most 0 but for rounding; and
    spans (version, start, end) that cover the tokens in order and without a gap, -1 for an unknown version.
    """
    try:
        _RESPONSE.validate_python(given)
    except ValidationError as error:
        return _words(error)
    tokens, logprobs = given["tokens"], given["logprobs"]
    if len(tokens) > max_new_tokens:
        return f"{len(tokens)} tokens, 1 to {max_new_tokens} were asked for"
    if max(tokens) >= vocab_size:
        return f"token id {max(tokens)} is not in the vocabulary (0 to {vocab_size - 1})"
    if len(logprobs) != len(tokens):
        return f"{len(logprobs)} logprobs of {len(tokens)} tokens"
    covered = 0
    for version, start, end in given["weight_versions"]:
        if start != covered or end <= start:
            return f"weight version {version} from token {start} to {end}, where {covered} comes next"
        covered = end
    return "" if covered == len(tokens) else f"weight versions of {covered} tokens of {len(tokens)}"


def _words(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}, not {on_one_line(repr(first['input']), 40)}"
