"""What passes for a response, whether a server sent it or a file of rollouts to be reused has it. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from dynamo_megatron.runtime.plain_text import on_one_line
from dynamo_megatron.types import LARGEST_REWARD, EpisodeRecord, Rollout, TurnRecord

ROUNDING = 1e-3  # nats: a logprob may be that much above 0
LOWEST = -3.4e38  # nats: what float32 holds
LARGEST_VERSION = 1 << 62
ROLLOUT_ID = re.compile(r"[0-9]{6,}-[0-9]{4,}-[0-9]{3,}")
TEXTS = ("rollout_id", "group_id", "prompt_id", "finish_reason", "status", "server")
LARGEST_TOKEN = 1 << 31
ENDS = ("stop", "length")  # finish reasons of a response that came


def response_fault(
    tokens: Any,
    logprobs: Any,
    weight_versions: Any,
    finish_reason: Any,
    *,
    vocab_size: int,
    max_new_tokens: int,
) -> str:
    """Why this is no response that can have been asked for, in a few words; "" where it is one.

    The first four may be anything that JSON holds. A response has 1 to `max_new_tokens` tokens, which are integers in
    [0, vocab_size); for each of them a finite natural logprob, at most 0 but for rounding; and spans (version, start,
    end) that cover the tokens in order and without a gap, -1 for an unknown version.
    """
    if not isinstance(tokens, list) or not 0 < len(tokens) <= max_new_tokens:
        count = len(tokens) if isinstance(tokens, list) else _shown(tokens)
        return f"{count} tokens, 1 to {max_new_tokens} were asked for"
    if not _integers(tokens) or min(tokens) < 0 or max(tokens) >= vocab_size:
        wrong = next(t for t in tokens if type(t) is not int or not 0 <= t < vocab_size)
        return f"token id {_shown(wrong)} is not in the vocabulary (0 to {vocab_size - 1})"
    if not isinstance(logprobs, list) or len(logprobs) != len(tokens):
        count = len(logprobs) if isinstance(logprobs, list) else _shown(logprobs)
        return f"{count} logprobs of {len(tokens)} tokens"
    if not set(map(type, logprobs)) <= {int, float} or not all(LOWEST <= p <= ROUNDING for p in logprobs):
        wrong = next(p for p in logprobs if type(p) not in (int, float) or not LOWEST <= p <= ROUNDING)
        return f"{_shown(wrong)} is no logprob"
    if finish_reason not in ENDS:
        return f"finish reason {_shown(finish_reason)}"
    return _spans_fault(weight_versions, len(tokens))


def _spans_fault(spans: Any, length: int) -> str:
    covered = 0
    for span in spans if isinstance(spans, list) else [spans]:
        if not isinstance(span, list | tuple) or len(span) != 3 or not _integers(span):
            return f"{_shown(span)} is no (version, start, end)"
        version, start, end = span
        if not -1 <= version <= LARGEST_VERSION:
            return f"weight version {_shown(version)}"
        if start != covered or end <= start:
            return f"weight version {version} from token {_shown(start)} to {_shown(end)}, where {covered} comes next"
        covered = end
    return "" if covered == length else f"weight versions of {covered} tokens of {length}"


def type_fault(rollout: Rollout) -> str:
    """Which field of a line of a file is of another type than a rollout's ("" where none is), in a few words."""
    texts = {name: getattr(rollout, name) for name in TEXTS}
    numbers = {"step": [rollout.step], "reward": [rollout.reward], "engine_logprobs": rollout.engine_logprobs}
    integers = {"tokens": rollout.tokens, "response_mask": rollout.response_mask}
    parts = rollout.reward_parts
    wrong = [name for name, text in texts.items() if not isinstance(text, str)]
    wrong += [name for name in ("prompt", "response") if not isinstance(getattr(rollout, name), str | None)]
    wrong += [name for name, values in numbers.items() if not isinstance(values, list) or not all(map(_number, values))]
    wrong += [name for name, values in integers.items() if not isinstance(values, list) or not all(map(_small, values))]
    if not all(len(span) == 3 and all(type(n) is int for n in span) for span in rollout.weight_versions):
        wrong.append("weight_versions")
    if type(rollout.success) is not bool:
        wrong.append("success")
    if not isinstance(parts, dict) or not all(map(_number, parts.values())):
        wrong.append("reward_parts")
    if not all(len(step) == 3 and _integers(step[:2]) and _number(step[2]) for step in rollout.step_rewards):
        wrong.append("step_rewards")
    if rollout.episode is not None and not _is_episode(rollout.episode):
        wrong.append("episode")
    failures = rollout.reward_failures
    if not isinstance(failures, dict) or not all(isinstance(state, str) for state in failures.values()):
        wrong.append("reward_failures")
    return f"{wrong[0]} {_shown(getattr(rollout, wrong[0]))} is of another type than a rollout's" if wrong else ""


def _number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) <= LARGEST_REWARD)


def _message(value: Any) -> bool:
    """One as `agents.messages.normalised` makes them."""
    if not isinstance(value, dict) or not all(isinstance(value.get(name), str) for name in ("role", "content")):
        return False
    calls = value.get("tool_calls", [])
    return isinstance(calls, list) and all(isinstance(c, dict) and isinstance(c.get("function"), dict) for c in calls)


def _is_episode(record: EpisodeRecord) -> bool:
    """Whether its fields have the right types."""
    messages, tools = [] if record.messages is None else record.messages, [] if record.tools is None else record.tools
    return (
        isinstance(record.starts, list)
        and all(map(_small, record.starts))
        and isinstance(record.counts, dict)
        and all(map(_small, record.counts.values()))
        and isinstance(messages, list)
        and all(map(_message, messages))
        and isinstance(tools, list)
        and all(isinstance(tool, dict) for tool in tools)
        and all(map(_turn, record.turns))
    )


def _turn(turn: TurnRecord) -> bool:
    places = (turn.start, turn.end, *(() if turn.message is None else (turn.message,)))
    return all(map(_small, places)) and _number(turn.asked) and _number(turn.answered)


def _small(value: Any) -> bool:
    """An integer that a token id may be."""
    return type(value) is int and 0 <= value < LARGEST_TOKEN


def identity_fault(rollout: Rollout) -> str:
    """Why a rollout of a file is none of a step's ("" where it is), in a few words."""
    name, group = rollout.rollout_id, rollout.group_id
    if not isinstance(name, str) or not ROLLOUT_ID.fullmatch(name) or name.rpartition("-")[0] != group:
        return f"rollout_id {_shown(name)} in group {_shown(group)}"
    return ""


def rollout_fault(rollout: Rollout, *, vocab_size: int, max_new_tokens: int) -> str:
    """As `response_fault`, of a rollout that a file has and that is to be trained on: also its prompt and reward."""
    mask, tokens = rollout.response_mask, rollout.tokens
    if not isinstance(tokens, list) or not isinstance(mask, list) or len(mask) != len(tokens):
        return "tokens and response_mask are no lists of one length"
    prompt = mask.count(0)
    if rollout.episode is not None:
        if fault := _episode_fault(rollout, vocab_size):
            return fault
    elif mask != [0] * prompt + [1] * (len(mask) - prompt):
        return "the response_mask is not 0 on the prompt and then 1"
    if not isinstance(rollout.server, str):
        return f"server {_shown(rollout.server)}"
    reward = rollout.reward
    if type(reward) not in (int, float) or not abs(reward) <= LARGEST_REWARD or type(rollout.success) is not bool:
        return f"reward {_shown(reward)}, success {_shown(rollout.success)}"
    if fault := _steps_fault(rollout.step_rewards, len(tokens) - prompt):
        return fault
    return response_fault(
        rollout.response_tokens,
        rollout.engine_logprobs,
        rollout.weight_versions,
        rollout.finish_reason,
        vocab_size=vocab_size,
        max_new_tokens=max_new_tokens,
    )


def _episode_fault(rollout: Rollout, vocab_size: int) -> str:
    tokens, mask, starts = rollout.tokens, rollout.response_mask, rollout.episode.starts
    if not set(map(type, mask)) <= {int} or not set(mask) <= {0, 1}:
        return "the response_mask is not of 0 and 1"
    if not _integers(tokens) or min(tokens) < 0 or max(tokens) >= vocab_size:
        return "a token id that is not in the vocabulary"
    ascending = isinstance(starts, list) and _integers(starts) and starts == sorted(set(starts))
    if not ascending or starts[0] != 0 or starts[-1] >= len(tokens) or any(mask[start] for start in starts):
        return f"segments that begin at {_shown(starts)}"
    return ""


def _steps_fault(steps: Sequence[Any], length: int) -> str:
    for step in steps:
        if len(step) != 3 or not _integers(step[:2]) or not 0 <= step[0] < step[1] <= length:
            return f"step {_shown(step)} of a response of {length} tokens"
        if type(step[2]) not in (int, float) or not abs(step[2]) <= LARGEST_REWARD:
            return f"reward {_shown(step[2])} of a step"
    return ""


def _integers(values: Sequence[Any]) -> bool:
    return set(map(type, values)) == {int}


def _shown(value: Any) -> str:
    return on_one_line(repr(value), 40)
