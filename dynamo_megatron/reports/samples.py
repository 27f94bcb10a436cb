"""`dynamo-megatron samples`: a run's rollouts, for people to read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dynamo_megatron.data.templates import load_tokenizer
from dynamo_megatron.errors import InputError
from dynamo_megatron.reports.run_record import read_config
from dynamo_megatron.rollout.store import read_typed_lines, step_files
from dynamo_megatron.runtime.plain_text import escaped_line, printable
from dynamo_megatron.types import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RULE = "-" * 80
SHOWN_IDS = 5  # of the prompts that there are, where the one asked for is not


@dataclass(frozen=True)
class Choice:
    """Which rollouts: of `step` (None: the newest, with `prompt_id` all), of `prompt_id` (None: any). Of them the
    `best` of the highest reward, then the `worst` of the lowest, of different prompts as long as there are any; with
    neither the first `limit`, group by group."""

    step: int | None = None
    prompt_id: str | None = None
    best: int | None = None
    worst: int | None = None
    limit: int = 8


class _Place(NamedTuple):
    """Which file a rollout is in, and what it is chosen by."""

    reward: float
    step: int
    rollout_id: str
    prompt_id: str
    file: Path


def read_samples(folder: Path, choice: Choice, *, as_json: bool = False) -> Iterator[str]:
    """Texts of the chosen rollouts of the run in `folder`, each without its last newline; as JSON one line each.

    No more than the chosen rollouts are in memory. Control characters are escaped. A line that is being written, or
    that a kill has torn, is left out. A run on recorded rollouts has them in the folder that it names. Raises
    ValueError: no run, no such step or prompt, a line that is broken, or texts that were not stored and no tokenizer to
    make them.
    """
    config = read_config(folder)
    source = Path(config["rollout"].get("recorded") or folder)
    places = _places(source, choice)
    chosen = _chosen(places, choice)
    texts = _Texts(config["model"]["path"])
    rollouts = _read(chosen)
    for place in chosen:
        rollout = texts.of(rollouts[place.rollout_id])
        yield _as_json(rollout) if as_json else _as_text(rollout)
    if not as_json:
        yield f"{RULE}\n{len(chosen)} of {len(places)} rollouts{_asked(choice, places)}; --help shows how to choose"


def _places(source: Path, choice: Choice) -> list[_Place]:
    """In the order of the ids; of two lines of a rollout the later one counts."""
    steps = step_files(source)
    files = list(steps.values())
    if not files:
        raise InputError(f"{source}: no rollouts/step-*.jsonl.zst; the run has generated nothing yet, or is one of sft")
    if choice.step is not None:
        if choice.step not in steps:
            raise InputError(
                f"--step: {source} has no rollouts of step {choice.step}, only of {min(steps)} to {max(steps)}"
            )
        files = [steps[choice.step]]
    elif choice.prompt_id is None:
        files = next(([file] for file in reversed(files) if next(_finished(file), None) is not None), files[-1:])
    found, prompts = {}, {}
    for file in files:
        for rollout in _finished(file):
            prompts[rollout.prompt_id] = None
            if choice.prompt_id in (None, rollout.prompt_id):
                found[rollout.rollout_id] = _Place(
                    rollout.reward, rollout.step, rollout.rollout_id, rollout.prompt_id, file
                )
    if not prompts:
        raise InputError(f"{files[-1]}: no rollout is complete yet")
    if not found:
        some = ", ".join([*map(repr, list(prompts)[:SHOWN_IDS]), *(["..."] if len(prompts) > SHOWN_IDS else [])])
        raise InputError(f"--prompt: no rollout of {choice.prompt_id!r} there; there are those of {some}")
    return [found[name] for name in sorted(found)]


def _finished(file: Path) -> Iterator[Rollout]:
    """Without the responses that have only begun."""
    return (rollout for rollout in read_typed_lines(file) if rollout.status != "partial")


def _chosen(places: Sequence[_Place], choice: Choice) -> list[_Place]:
    """Of equal rewards the first by id."""
    if choice.best is None and choice.worst is None:
        return list(places[: choice.limit])
    best = _first(sorted(places, key=lambda place: -place.reward), choice.best or 0)
    worst = _first(sorted(places, key=lambda place: place.reward), choice.worst or 0)
    return [*best, *(place for place in worst if place not in best)]


def _first(places: Sequence[_Place], count: int) -> list[_Place]:
    """Each prompt's first one in their order, then each prompt's second one, and so on."""
    seen: Counter[str] = Counter()
    turns = []
    for place in places:
        turns.append(seen[place.prompt_id])
        seen[place.prompt_id] += 1
    order = sorted(range(len(places)), key=turns.__getitem__)
    return [places[i] for i in order[:count]]


def _read(places: Sequence[_Place]) -> dict[str, Rollout]:
    """By rollout_id. A resumed run may discard lines meanwhile: so the later of two lines is found anew."""
    names = {place.rollout_id for place in places}
    files = dict.fromkeys(place.file for place in places)
    found = {r.rollout_id: r for file in files for r in _finished(file) if r.rollout_id in names}
    if gone := sorted(names - found.keys()):
        raise InputError(f"rollout {gone[0]} was discarded meanwhile by the run, which was resumed; try again")
    return found


class _Texts:
    """Fills in the texts of rollouts that were stored without, by the tokenizer in `model_path`."""

    def __init__(self, model_path: str):
        self._path, self._tokenizer = model_path, None

    def of(self, rollout: Rollout) -> Rollout:
        if rollout.prompt is None:
            if self._tokenizer is None:
                self._tokenizer = self._load()
            length = rollout.response_mask.count(0)
            rollout.prompt = self._tokenizer.decode(rollout.tokens[:length])
            rollout.response = self._tokenizer.decode(rollout.tokens[length:], skip_special_tokens=True)
        return rollout

    def _load(self) -> PreTrainedTokenizerBase:
        try:
            return load_tokenizer(self._path)
        except ValueError as error:
            raise InputError(
                f"this run stored token ids without texts, and they cannot be decoded: {error}; run this where the "
                "model's folder is"
            ) from None


def _asked(choice: Choice, places: Sequence[_Place]) -> str:
    steps = sorted({place.step for place in places})
    of = f" of step {steps[0]}" if len(steps) == 1 else f" of steps {steps[0]} to {steps[-1]}"
    return of + (f" to {escaped_line(choice.prompt_id)}" if choice.prompt_id is not None else "")


def _as_json(rollout: Rollout) -> str:
    keys = ("step", "rollout_id", "prompt_id", "reward", "success", "reward_parts", "reward_failures", "status")
    fields = {key: getattr(rollout, key) for key in (*keys, "finish_reason")}
    fields |= {"length": sum(rollout.response_mask), "prompt": rollout.prompt}
    if rollout.episode is not None:
        episode = rollout.episode
        messages = None if episode.messages is None else [_with_texts(message) for message in episode.messages]
        fields |= {"messages": messages, "tools": episode.tools, "counts": episode.counts, "reason": episode.reason}
    return json.dumps({**fields, "response": rollout.response, "answer": rollout.answer})


def _with_texts(message: dict[str, Any]) -> dict[str, Any]:
    """The message with the arguments of its tool calls as JSON, as OpenAI's format has them."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        given = call["function"]["arguments"]
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    return {**message, "tool_calls": calls}


def _said(rollout: Rollout) -> Iterator[str]:
    """Prompt and response, or the conversation of an episode."""
    messages = None if rollout.episode is None else rollout.episode.messages
    if messages is None:
        yield from ("prompt:", indented(rollout.prompt or ""), "response:", indented(rollout.response or ""))
        return
    counts = ", ".join(f"{escaped_line(name)} {count}" for name, count in rollout.episode.counts.items())
    yield f"episode: {counts}; its last conversation:"
    for message in messages:
        calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
        yield f"{escaped_line(message['role'])}:"
        yield indented("\n".join([*([message["content"]] if message["content"] else []), *calls]))


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
    if rollout.answer is not None:
        lines += ["answer:", indented(_plain(rollout.answer))]
    return "\n".join(lines)


def _plain(answer: Any) -> str:
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)


def indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in printable(text).split("\n"))
