"""Where prompts come from: a JSONL file, a reasoning-gym dataset, or the user's own iterator."""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from dynamo_megatron.config import DataConfig
from dynamo_megatron.data.user_code import SPEC, load_callable
from dynamo_megatron.records import Prompt

log = logging.getLogger(__name__)

REASONING_GYM = "reasoning_gym:"


def load_prompts(config: DataConfig) -> list[Prompt]:
    """All prompts of `config.source`, in its order.

    Three kinds of source:
    - `PATH.jsonl`: one JSON object a line; `prompt_key` (text, or a list of chat messages), `answer_key` and `id_key`
      may be dotted. The columns not named by them are kept in `Prompt.meta`. A row without an id gets one from the hash
      of its prompt and answer, which does not depend on the row's place.
    - `reasoning_gym:NAME?size=N&seed=S&key=value`: values are YAML scalars or lists; the seed is 0 unless given, since
      the library's own default is a random one. The entry stays in `Prompt.meta["reasoning_gym"]` for its scorer.
    - `module:iterator`: a function without arguments that returns finitely many `Prompt`s or rows as in a JSONL file.

    One problem has one id: a row that repeats an id with the same content is dropped (with a warning that counts them),
    with other content it is an error. Raises ValueError (one line, with `path:line` where there is one).
    """
    source = config.source
    if source.startswith(REASONING_GYM):
        located = _reasoning_gym_prompts(source)
    elif source.endswith(".jsonl"):
        located = ((where, _prompt_from_row(row, where, config)) for where, row in _jsonl_rows(Path(source)))
    elif SPEC.fullmatch(source):
        located = _user_prompts(config)
    else:
        raise ValueError(
            f"data.source: {source!r} is no known source; "
            "give a .jsonl file, reasoning_gym:NAME?key=value or module:iterator"
        )
    return _unique(located, config)


def _unique(located: Iterable[tuple[str, Prompt]], config: DataConfig) -> list[Prompt]:
    first: dict[str, tuple[str, Prompt]] = {}
    repeated = 0
    for where, prompt in located:
        if config.template != "chat" and prompt.messages is not None:
            raise ValueError(f"{where}: chat messages need data.template: chat, not a plain template")
        known_where, known = first.setdefault(prompt.prompt_id, (where, prompt))
        if known is prompt:
            continue
        if known != prompt:
            raise ValueError(
                f"{where}: the id {prompt.prompt_id!r} is taken by {known_where} with other content; "
                f"give every problem its own id (data.id_key: {config.id_key})"
            )
        repeated += 1
    if not first:
        raise ValueError(f"data.source: {config.source} has no prompts")
    if repeated:
        log.warning("data.source: %s: dropped %d rows that repeat another one", config.source, repeated)
    return [prompt for _, prompt in first.values()]


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    if not path.is_file():
        raise ValueError(f"data.source: there is no file {path}")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{path}:{number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if text:
                    yield where, json.loads(text)
            except UnicodeDecodeError as error:
                raise ValueError(f"{where}: not UTF-8 text: {error.reason} at byte {error.start}") from None
            except json.JSONDecodeError as error:
                raise ValueError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None


def _look_up(row: dict[str, Any], key: str) -> tuple[bool, Any]:
    """(found, value); a key that stands in the row as it is comes before its reading as a path."""
    if key in row:
        return True, row[key]
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            return False, None
        value = value[part]
    return True, value


def _prompt_from_row(row: Any, where: str, config: DataConfig) -> Prompt:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a row must be a JSON object, not {type(row).__name__}")
    values = {}
    for name, key in (("prompt_key", config.prompt_key), ("answer_key", config.answer_key)):
        found, values[name] = _look_up(row, key)
        if not found:
            raise ValueError(f"{where}: no {key!r}; the row has {', '.join(map(str, row))} (set data.{name})")
    content, answer = values["prompt_key"], values["answer_key"]
    has_id, row_id = _look_up(row, config.id_key)
    if not has_id:
        row_id = _digest(content, answer)
    elif isinstance(row_id, bool) or not isinstance(row_id, str | int) or row_id == "":
        raise ValueError(f"{where}: the id in {config.id_key!r} must be text or a whole number, not {row_id!r}")
    if not isinstance(content, str | list):
        raise ValueError(
            f"{where}: {config.prompt_key!r} must be text or a list of messages, not {type(content).__name__}"
        )
    prompt = Prompt(
        prompt_id=str(row_id),
        messages=content if isinstance(content, list) else None,
        text=content if isinstance(content, str) else None,
        answer=answer,
        source=config.source,
        meta={k: v for k, v in row.items() if k not in (config.prompt_key, config.answer_key, config.id_key)},
    )
    _check_content(prompt, where)
    return prompt


def _check_content(prompt: Prompt, where: str) -> None:
    if prompt.text is not None:
        if not prompt.text.strip():
            raise ValueError(f"{where}: the prompt is empty")
        return
    for message in prompt.messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise ValueError(f"{where}: a chat message needs 'role' and 'content' as text, not {message!r:.80}")
    if not any(message["content"].strip() for message in prompt.messages):
        raise ValueError(f"{where}: the prompt is empty")


def _user_prompts(config: DataConfig) -> Iterator[tuple[str, Prompt]]:
    items = load_callable(config.source, "data.source")()
    if not isinstance(items, Iterable):
        raise ValueError(f"data.source: {config.source} returned {type(items).__name__}, not prompts one after another")
    for number, item in enumerate(items, 1):
        where = f"{config.source} row {number}"
        if isinstance(item, Prompt):
            _check_content(item, where)
            yield where, item
        else:
            yield where, _prompt_from_row(item, where, config)


def reasoning_gym_dataset(name: str, options: dict[str, Any]) -> Any:
    """The reasoning-gym dataset `name` with the fields `options` of its configuration.

    Raises ValueError (one line): package missing, unknown name or option (with the nearest one), refused value.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise ValueError(f"data.source: {REASONING_GYM}{name}: {error}; pip install reasoning-gym") from None
    if name not in DATASETS:
        raise ValueError(f"data.source: reasoning_gym has no dataset {name!r}{_nearest(name, DATASETS)}")
    fields = [field.name for field in dataclasses.fields(DATASETS[name][1])]
    for option in options:
        if option not in fields:
            raise ValueError(f"data.source: {REASONING_GYM}{name} has no option {option!r}{_nearest(option, fields)}")
    try:
        return reasoning_gym.create_dataset(name, **options)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        text = " ".join(str(error).split())
        raise ValueError(
            f"data.source: {REASONING_GYM}{name} refuses {options}: {type(error).__name__}: {text}"
        ) from error


def _reasoning_gym_prompts(source: str) -> Iterator[tuple[str, Prompt]]:
    name, _, query = source.removeprefix(REASONING_GYM).partition("?")
    options: dict[str, Any] = {"seed": 0}
    for item in filter(None, query.split("&")):
        option, equals, value = item.partition("=")
        if not equals or not option:
            raise ValueError(f"data.source: {source}: {item!r} is not of the form key=value")
        try:
            parsed = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ValueError(f"data.source: {source}: the value of {option!r} is not YAML: {value!r}") from None
        options[option] = value if isinstance(parsed, datetime.date) else parsed  # a YAML date is not plain data
    dataset = reasoning_gym_dataset(name, options)
    # The resolved configuration, so that writing a default out, or an upgrade that changes one, is seen in the ids.
    digest = _digest(name, dataclasses.asdict(dataset.config))
    for index in range(len(dataset)):
        entry = dataset[index]
        meta = {"reasoning_gym": {"dataset": name, "options": options, "entry": entry}}
        prompt_id = f"{name}-{digest}/{index}"
        prompt = Prompt(prompt_id, text=entry["question"], answer=entry["answer"], source=source, meta=meta)
        yield f"{source} entry {index}", prompt


def _digest(*values: Any) -> str:
    """16 hexadecimal digits of plain data's hash."""
    canonical = json.dumps(values, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)
    return f"; the nearest is {close[0]!r}" if close else ""
