"""`dynamo-megatron samples`: a run's rollouts, for people to read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_megatron.errors import InputError
from dynamo_megatron.reports.run_record import read_config
from dynamo_megatron.rollout.store import read_rollouts, step_files
from dynamo_megatron.runtime.plain_text import escaped_line, printable
from dynamo_megatron.types import Rollout

RULE = "-" * 80


@dataclass(frozen=True)
class Choice:
    """Which rollouts: of `step` (None: the newest, with `prompt_id` all), of `prompt_id` (None: any). Of them the
    `best` of the highest reward, then the `worst` of the lowest; with neither the first `limit`, group by group."""

    step: int | None = None
    prompt_id: str | None = None
    best: int | None = None
    worst: int | None = None
    limit: int = 8


def read_samples(folder: Path, choice: Choice, *, as_json: bool = False) -> Iterator[str]:
    """Texts of the chosen rollouts of the run in `folder`, each without its last newline; as JSON one line each.

    Control characters are escaped. A line that is being written, or that a kill has torn, is left out. A run on
    recorded rollouts has them in the folder that it names. Raises ValueError: no run, no such step or prompt, or a line
    that is broken.
    """
    rollouts = _read(Path(read_config(folder)["rollout"].get("recorded") or folder), choice)
    chosen = _chosen(rollouts, choice)
    for rollout in chosen:
        yield _as_json(rollout) if as_json else _as_text(rollout)
    if not as_json:
        steps = sorted({rollout.step for rollout in rollouts})
        of = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
        yield f"{RULE}\n{len(chosen)} of {len(rollouts)} rollouts of {of}; --help shows how to choose"


def _read(source: Path, choice: Choice) -> list[Rollout]:
    """The rollouts that are chosen from, in the order of their ids."""
    files = step_files(source)
    if not files:
        raise InputError(f"{source}: no rollouts/step-*.jsonl.zst; the run has generated nothing yet, or is one of sft")
    if choice.step is not None and choice.step not in files:
        steps = f"{min(files)} to {max(files)}"
        raise InputError(f"--step: {source} has no rollouts of step {choice.step}, only of {steps}")
    found: list[Rollout] = []
    for step in [choice.step] if choice.step is not None else reversed(files):
        rollouts = read_rollouts(files[step])
        found += [r for r in rollouts if choice.prompt_id in (None, r.prompt_id)]
        if found and choice.prompt_id is None:
            break  # the newest step with a complete rollout
    if not found:
        of = "" if choice.prompt_id is None else f" of prompt {choice.prompt_id!r}"
        raise InputError(f"{source}: no complete rollout{of}; --step and --prompt choose others")
    return sorted(found, key=lambda r: r.rollout_id)


def _chosen(rollouts: Sequence[Rollout], choice: Choice) -> list[Rollout]:
    """Of equal rewards the first by id."""
    if choice.best is None and choice.worst is None:
        return list(rollouts[: choice.limit])
    best = sorted(rollouts, key=lambda r: -r.reward)[: choice.best or 0]
    worst = sorted(rollouts, key=lambda r: r.reward)[: choice.worst or 0]
    return [*best, *(r for r in worst if r not in best)]


def _as_json(rollout: Rollout) -> str:
    keys = ("step", "rollout_id", "prompt_id", "reward", "success", "reward_parts", "reward_failures", "status")
    fields = {key: getattr(rollout, key) for key in (*keys, "finish_reason")}
    fields |= {"length": sum(rollout.response_mask), "prompt": rollout.prompt}
    if (episode := rollout.episode) is not None:
        fields |= {key: getattr(episode, key) for key in ("tools", "counts", "reason")}
        fields["messages"] = episode.messages and [_in_openai_format(message) for message in episode.messages]
    return json.dumps({**fields, "response": rollout.response, "answer": rollout.answer})


def _in_openai_format(message: dict[str, Any]) -> dict[str, Any]:
    """The message with the arguments of its tool calls as JSON."""
    if not message.get("tool_calls"):
        return message
    calls = [{**call, "function": {**call["function"]}} for call in message["tool_calls"]]
    for call in calls:
        if not isinstance(given := call["function"]["arguments"], str):
            call["function"]["arguments"] = json.dumps(given, ensure_ascii=False)
    return {**message, "tool_calls": calls}


def message_text(message: dict[str, Any]) -> str:
    """Role, content and tool calls of a message of an agent's conversation, in OpenAI's format."""
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls") or ()]
    return "\n".join(filter(None, [f"{message['role']}:", message["content"], *calls]))


def _said(rollout: Rollout) -> Iterator[str]:
    """Prompt and response, or the conversation of an episode."""
    messages = None if rollout.episode is None else rollout.episode.messages
    if messages is None:
        yield from ("prompt:", indented(rollout.prompt or ""), "response:", indented(rollout.response or ""))
        return
    counts = ", ".join(f"{escaped_line(name)} {count}" for name, count in rollout.episode.counts.items())
    yield f"episode: {counts}; its last conversation:"
    for message in messages:
        role, *lines = message_text(message).split("\n", 1)
        yield from (escaped_line(role), *map(indented, lines))


def _as_text(rollout: Rollout) -> str:
    scores = {name: f"{value:g}" for name, value in rollout.reward_parts.items()} | rollout.reward_failures
    parts = ", ".join(f"{escaped_line(name)} {escaped_line(score)}" for name, score in scores.items())
    status = "" if rollout.status == "ok" else f", {rollout.status}"
    lines = [
        RULE,
        f"step {rollout.step}, prompt {escaped_line(rollout.prompt_id)}, rollout {escaped_line(rollout.rollout_id)}",
        f"reward {rollout.reward:g} ({'success' if rollout.success else 'no success'}{status})"
        + (f" from {parts}" if parts else ""),
        f"finish: {rollout.finish_reason}, {sum(rollout.response_mask)} tokens",
        *([f"failed: {escaped_line(rollout.episode.reason)}"] if rollout.episode and rollout.episode.reason else []),
        *_said(rollout),
    ]
    if (answer := rollout.answer) is not None:
        answer = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
        lines += ["answer:", indented(answer)]
    return "\n".join(lines)


def indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in printable(text).split("\n"))
