"""`dynamo-megatron samples`: a run's rollouts, for people to read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dynamo_megatron.errors import InputError
from dynamo_megatron.reports.run_record import read_config
from dynamo_megatron.rollout.store import read_rollouts, step_files
from dynamo_megatron.runtime.plain_text import escaped_line, printable
from dynamo_megatron.types import Rollout

RULE = "-" * 80


def _files(folder: Path) -> tuple[Path, dict[int, Path]]:
    """Where the rollouts of the run in `folder` are, and the file of each step."""
    source = Path(read_config(folder)["rollout"].get("recorded") or folder)
    if not (files := step_files(source)):
        raise InputError(
            f"{source}: no rollouts/step-*.jsonl.zst; it has generated nothing yet, or is a run of sft or dpo"
        )
    return source, files


def read_samples(
    folder: Path,
    step: int | None = None,
    prompt_id: str | None = None,
    best: int | None = None,
    worst: int | None = None,
    limit: int | None = None,
    *,
    as_json: bool = False,
) -> Iterator[str]:
    """Texts of rollouts of the run in `folder`, each without its last newline; as JSON one line each. Those of `step`
    (None: the newest, with `prompt_id` all) and of `prompt_id` (None: any). Of them the `best` of the highest reward,
    then the `worst` of the lowest; with neither the first `limit` by id (None: 8, as JSON all).

    Control characters are escaped. A line that is being written, or that a kill has torn, is left out. A run on
    recorded rollouts has them in the folder that it names. Raises ValueError: no run, no such step or prompt, or a line
    that is broken.
    """
    source, files = _files(folder)
    if step is not None and step not in files:
        raise InputError(f"--step: {source} has no rollouts of step {step}, only of {min(files)} to {max(files)}")
    found: list[Rollout] = []
    for each in [step] if step is not None else reversed(files):
        found += [r for r in read_rollouts(files[each], routes=False) if prompt_id in (None, r.prompt_id)]
        if found and prompt_id is None:
            break  # the newest step with a complete rollout
    if not found:
        of = "" if prompt_id is None else f" of prompt {prompt_id!r}"
        raise InputError(f"{source}: no complete rollout{of}; --step and --prompt choose others")
    found.sort(key=lambda r: r.rollout_id)
    shown = found[: limit or (None if as_json else 8)]
    if best is not None or worst is not None:  # of equal rewards the first by id
        scored = sorted((r for r in found if r.status == "ok"), key=lambda r: r.reward)
        shown = sorted(scored, key=lambda r: -r.reward)[: best or 0]
        shown += [r for r in scored[: worst or 0] if r not in shown]
    yield from map(_as_json if as_json else _as_text, shown)
    if not as_json:
        steps = " to ".join(map(str, dict.fromkeys([found[0].step, found[-1].step])))
        yield f"{RULE}\n{len(shown)} of {len(found)} rollouts of step {steps}; --help shows how to choose"


def read_pairs(folder: Path) -> Iterator[str]:
    """The `pairs_of` the steps of a run, each a line of JSON. Raises ValueError as `read_samples`."""
    _, files = _files(folder)
    for step in sorted(files):
        yield from map(json.dumps, pairs_of(read_rollouts(files[step], routes=False)))


def pairs_of(rollouts: Iterable[Rollout]) -> Iterator[dict[str, str]]:
    """A row for `dynamo-megatron dpo` of each group whose rewards differ: the prompt as the model saw it, and the
    responses of the highest and of the lowest reward (of equal ones the first). Episodes of agents and truncated
    responses are left out."""
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        whole = rollout.finish_reason == "stop" and rollout.episode is None
        if rollout.status == "ok" and whole and None not in (rollout.prompt, rollout.response):
            groups.setdefault(rollout.group_id, []).append(rollout)
    for name, group in groups.items():
        best, worst = (f(group, key=lambda r: r.reward) for f in (max, min))
        if best.reward > worst.reward:
            yield {"id": name, "prompt": best.prompt, "chosen": best.response, "rejected": worst.response}


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
