"""What passes for a response, whether a server sent it or a file of rollouts to be reused has it. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from dynamo_megatron.runtime.plain_text import on_one_line
from dynamo_megatron.types import LARGEST_REWARD, Rollout

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


def rollout_fault(rollout: Rollout, *, vocab_size: int, max_new_tokens: int) -> str:
    """As `response_fault`, of a rollout that a file has and that is to be trained on: also its prompt and reward."""
    mask, tokens, prompt = rollout.response_mask, rollout.tokens, rollout.response_mask.count(0)
    if len(mask) != len(tokens):
        return "tokens and response_mask are no lists of one length"
    if rollout.routes is not None and (rollout.routes.ndim != 3 or len(rollout.routes) != len(tokens)):
        return f"routes of shape {rollout.routes.shape} for {len(tokens)} tokens"
    if rollout.episode is not None:
        starts = rollout.episode.starts
        if not set(mask) <= {0, 1}:
            return "the response_mask is not of 0 and 1"
        if max(tokens, default=0) >= vocab_size:
            return "a token id that is not in the vocabulary"
        ascending = starts[:1] == [0] and starts == sorted(set(starts))
        if not ascending or starts[-1] >= len(tokens) or any(mask[start] for start in starts):
            return f"segments that begin at {_shown(starts)}"
    elif mask != [0] * prompt + [1] * (len(mask) - prompt):
        return "the response_mask is not 0 on the prompt and then 1"
    for reward in (rollout.reward, *(reward for _, _, reward in rollout.step_rewards)):
        if not abs(reward) <= LARGEST_REWARD:
            return f"reward {_shown(reward)}"
    for step in rollout.step_rewards:
        if not 0 <= step[0] < step[1] <= len(tokens) - prompt:
            return f"step {_shown(step)} of a response of {len(tokens) - prompt} tokens"
    response = {"tokens": rollout.response_tokens, "logprobs": rollout.engine_logprobs}
    response |= {"weight_versions": rollout.weight_versions, "finish_reason": rollout.finish_reason}
    return response_fault(response, vocab_size=vocab_size, max_new_tokens=max_new_tokens)


def _words(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}, not {_shown(first['input'])}"


def _shown(value: Any) -> str:
    return on_one_line(repr(value), 40)
