"""Reads prompts from a file, the `datasets` library, a reasoning-gym dataset, or the user's own iterator."""

from __future__ import annotations

import codecs
import dataclasses
import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from dynamo_megatron.config import DataConfig, shipped
from dynamo_megatron.errors import InputError
from dynamo_megatron.runtime import plain_json
from dynamo_megatron.runtime.plain_text import error_line, on_one_line
from dynamo_megatron.runtime.user_code import SPEC, failure, load_callable
from dynamo_megatron.types import Prompt, is_empty

log = logging.getLogger(__name__)

DATASETS = "datasets:"
MOST_OLD = 10_000  # rows of a function in a row that may bring no new problem
MOST_ROWS = 10_000_000  # of a function without data.limit
ROWS = 16  # of a Parquet file read at once: Arrow cannot read 2 GiB of a nested column at once
TEXT_OPTIONS = ("name", "split")  # not parsed as YAML, where the configuration "no" (Norwegian) would be False
REASONING_GYM = "reasoning_gym:"
WAYS = "data.chat_template to plain (lines of User: and Assistant:) or to a Jinja file"
NEEDS_CHAT = (
    f"chat messages need data.template: chat, not a plain template; for a tokenizer without a chat template set {WAYS}"
)
# Where a key is not configured, the first of these that the row has is used: the usual columns, then verl's.
USUAL_KEYS = {"prompt_key": ("problem", "question", "prompt"), "answer_key": ("answer", "reward_model.ground_truth")}


def load_prompts(
    config: DataConfig,
    on_progress: Callable[[int], None] = lambda count: None,
    *,
    needs_answer: bool = False,
    conversations: bool = False,
    say: Callable[[str], None] = log.warning,
) -> list[Prompt]:
    """All prompts of `config.source` in their order there, or the first `config.limit` (docs/data.md).

    A row that is no problem, or that has no answer where `needs_answer`, is skipped (with `conversations`, messages
    that end with the assistant's need no other answer); it is an error where more than half of the rows are so. A row
    that repeats an id with the same content is dropped; with other content it is an error. A row without an id gets one
    from the hash of its prompt and answer. `say` is called with a line that counts the skipped rows, and one that
    counts the dropped ones. `on_progress` is called with the number of problems read so far. Raises ValueError (one
    line, with `path:line` or `path row N`), also where a function seems to have no end.
    """
    first: dict[str, Prompt] = {}
    first_bad: InputError | None = None
    bad = repeated = differ = last_new = 0  # rows, rows, rows of these, number of a row
    in_arrow = config.source.startswith(DATASETS) or config.source.endswith(".parquet")
    for number, (where, item) in enumerate(_located_rows(config.source), 1):
        _check_end(config, number, last_new, first_bad)
        try:
            prompt = item if isinstance(item, Prompt) else _prompt_from_row(item, where, config, in_arrow)
            answered = _ends_with_answer(prompt.messages)
            if answered and not conversations:
                raise InputError(f"{where}: the last message is the assistant's; leave it out, or train on it with sft")
            _check_content(prompt, where, needs_answer and not answered)
        except InputError as error:
            first_bad, bad = first_bad or error, bad + 1
            continue
        if config.template != "chat" and prompt.messages is not None:
            raise InputError(f"{where}: {NEEDS_CHAT}")
        prompt.where = where
        known = first.setdefault(prompt.prompt_id, prompt)
        if known is prompt:
            last_new = number
            on_progress(len(first))
            if len(first) == config.limit:
                break
        elif _content_digest(known) == _content_digest(prompt):  # NaN, which a column may hold, does not equal itself
            repeated, differ = repeated + 1, differ + (repr(known.meta) != repr(prompt.meta))
        else:
            raise InputError(
                f"{where}: the id {prompt.prompt_id!r:.80} is taken by {known.where} with other content; "
                f"give every problem its own id (data.id_key: {config.id_key})"
            )
    if first_bad is not None:
        counted = f"{bad:,} of {bad + repeated + len(first):,} rows cannot be used"
        if bad > repeated + len(first):
            raise InputError(f"{first_bad}; {counted}") if bad > 1 else first_bad
        say(f"data.source: {config.source}: {counted} and are skipped, the first: {first_bad}")
    if not first:
        raise InputError(f"data.source: {config.source} has no prompts")
    if repeated:
        but = f"; {differ} of them have other columns: if these distinguish problems, give the rows ids"
        say(f"data.source: {config.source}: dropped {repeated} rows that repeat another one{but if differ else ''}")
    return list(first.values())


def _check_end(config: DataConfig, rows: int, last_new: int, first_bad: InputError | None) -> None:
    """Raises InputError where the source is a function that seems to have no end. `rows`: how many came; `last_new`:
    the number of the last one that brought a new problem."""
    if not SPEC.fullmatch(config.source) or config.source.startswith((DATASETS, REASONING_GYM)):
        return
    if rows - last_new > MOST_OLD:
        because = f" (the first row that cannot be used: {first_bad})" if first_bad else ""
        raise InputError(
            f"data.source: {config.source}: no new problem in {MOST_OLD:,} rows after row {last_new:,}{because}; "
            "let the function end, or set data.limit to the number of its problems"
        )
    if config.limit is None and rows > MOST_ROWS:
        raise InputError(f"data.source: {config.source} yields more than {MOST_ROWS:,} rows; set data.limit")


def _located_rows(source: str) -> Iterator[tuple[str, Any]]:
    """(place in the source, row or prompt) of every row. Raises ValueError as `load_prompts`."""
    if source.startswith(REASONING_GYM):
        return _reasoning_gym_prompts(source)
    if source.startswith(DATASETS):
        return _numbered(source, lambda: dataset_rows(source))
    if source.endswith(".jsonl"):
        return jsonl_rows(shipped.problems(source))
    if source.endswith(".parquet"):
        return _numbered(source, lambda: parquet_rows(Path(source)))
    if SPEC.fullmatch(source):
        return _numbered(source, load_callable(source, "data.source"))
    raise InputError(
        f"data.source: {source!r} is no known source; "
        "give a .jsonl or .parquet file, datasets:NAME?key=value, reasoning_gym:NAME?key=value or module:iterator"
    )


def _content_digest(prompt: Prompt) -> str:
    """A hash (16 hexadecimal digits) that is equal for rows that may share an id."""
    from_content = prompt.prompt_id == _digest(prompt.messages or prompt.text, prompt.answer)
    columns = [] if from_content else [prompt.meta]  # else other columns (row numbers) may differ
    return _digest(prompt.messages, prompt.text, prompt.answer, *columns)


def look_up(row: dict[str, Any], key: str) -> tuple[bool, Any]:
    """(found, value) of `key`: the row's column of that name, else `key` as a dotted path."""
    if key in row:
        return True, row[key]
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            return False, None
        value = value[part]
    return True, value


def _resolved(row: dict[str, Any], where: str, name: str, configured: str | None) -> tuple[str, Any]:
    """(key, value) of the column that data.`name` selects in this row: the first that is not empty, else the first.
    Raises InputError where there is none."""
    keys = USUAL_KEYS[name] if configured is None else (configured,)
    columns = [(key, value) for key in keys for found, value in [look_up(row, key)] if found]
    if columns:
        return next((column for column in columns if not is_empty(column[1])), columns[0])
    looked_for = " or ".join(map(repr, keys))
    has = on_one_line(", ".join(map(str, row)), 300)
    raise InputError(f"{where}: no {looked_for}; the row has {has} (set data.{name})")


def _ends_with_answer(content: Any) -> bool:
    last = content[-1] if isinstance(content, list) and content else None
    return isinstance(last, dict) and last.get("role") == "assistant"


def _prompt_from_row(row: Any, where: str, config: DataConfig, in_arrow: bool) -> Prompt:
    if not isinstance(row, dict):
        raise InputError(f"{where}: a row must be a JSON object, not {type(row).__name__}")
    prompt_key, content = _resolved(row, where, "prompt_key", config.prompt_key)
    if not isinstance(content, str | list):
        kind = "null" if content is None else type(content).__name__
        raise InputError(f"{where}: {prompt_key!r} must be text or a list of messages, not {kind}")
    try:
        answer_key, answer = _resolved(row, where, "answer_key", config.answer_key)
    except InputError:
        if config.answer_key is not None or not _ends_with_answer(content):
            raise
        answer_key, answer = "", None
    if isinstance(content, list):
        content = [_message(message, in_arrow) for message in content]
    has_id, row_id = look_up(row, config.id_key)
    if not has_id:
        row_id = _digest(content, answer)
    elif isinstance(row_id, bool) or not isinstance(row_id, str | int) or row_id == "":
        raise InputError(f"{where}: the id in {config.id_key!r} must be text or a whole number, not {row_id!r:.80}")
    meta = {k: v for k, v in row.items() if k not in (prompt_key, answer_key, config.id_key)}
    if in_arrow and "tools" in meta:
        meta["tools"] = _without_nulls(meta["tools"])
    return Prompt(
        prompt_id=str(row_id),
        messages=content if isinstance(content, list) else None,
        text=content if isinstance(content, str) else None,
        answer=answer,
        source=config.source,
        meta=meta,
    )


def _message(message: Any, in_arrow: bool) -> Any:
    """Without its fields that are null: chat templates test whether a field exists. A message that only calls tools has
    an empty text."""
    if not isinstance(message, dict):
        return message
    fields = {k: _without_nulls(v) if in_arrow else v for k, v in message.items() if v is not None}
    return {"content": "", **fields} if fields.get("tool_calls") else fields


def _without_nulls(value: Any) -> Any:
    """In Arrow, a field of one object in a list is null in the others, at every depth."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _check_content(prompt: Prompt, where: str, needs_answer: bool) -> None:
    if not isinstance(prompt.prompt_id, str):
        raise InputError(f"{where}: the id {prompt.prompt_id!r:.80} must be a str")
    if needs_answer and is_empty(prompt.answer):
        said = "null" if prompt.answer is None else repr(prompt.answer)
        raise InputError(f"{where}: the answer is {said}; there must be one to compare with or to train on")
    if prompt.text is not None:
        if not isinstance(prompt.text, str):
            raise InputError(f"{where}: the prompt must be text, or `messages`, not {prompt.text!r:.80}")
        if not prompt.text.strip():
            raise InputError(f"{where}: the prompt is empty")
        return
    for message in prompt.messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise InputError(f"{where}: a chat message needs 'role' and 'content' as text, not {message!r:.80}")
    if not any(message["content"].strip() for message in prompt.messages):
        raise InputError(f"{where}: the prompt is empty")


def jsonl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """("path:line", value) of every line that is not empty, parsed by `plain_json.parse`. Raises ValueError (one
    line)."""
    if not path.is_file():
        raise InputError(f"data.source: there is no file {path}")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            where, line = f"{path}:{number}", line.removeprefix(codecs.BOM_UTF8).strip()
            if line:
                yield where, plain_json.parse(line, where)


def _numbered(source: str, rows: Callable[[], Iterable[Any]]) -> Iterator[tuple[str, Any]]:
    """("source row N", row) with N from 1. Raises ValueError (one line) if `rows` or its iterator raises anything."""
    number = 0
    try:
        for number, row in enumerate(rows(), 1):
            yield f"{source} row {number}", row
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything, and so do the libraries
        # When building a dataset fails, the library wraps the cause in an error that does not name it.
        said = failure(error)[0] if SPEC.fullmatch(source) else error_line(error.__cause__ or error)
        raise InputError(f"data.source: {source}{f' after row {number}' if number else ''}: {said}") from error


def parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows, their values as plain Python. ROWS rows are in memory at a time."""
    import pyarrow.parquet

    if not path.is_file():
        raise InputError(f"data.source: there is no file {path}")
    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=ROWS):
            yield from batch.to_pylist(maps_as_pydicts="lossy")


def dataset_rows(source: str) -> Iterator[dict[str, Any]]:
    """The rows of `datasets:NAME?split=SPLIT&key=value`. The default split is "train".

    NAME is a folder written by the `datasets` library's `save_to_disk`, or a name for its `load_dataset`, which gets
    the options. Raises ValueError (one line) where the package is missing.
    """
    name, options = name_and_options(source.removeprefix(DATASETS), source)
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise InputError(f"data.source: {source}: {error}; pip install 'dynamo-megatron[datasets]'") from None
    if any((Path(name) / file).is_file() for file in ("dataset_dict.json", "state.json")):
        dataset = datasets.load_from_disk(name)
        splits, alone = dataset, not isinstance(dataset, dict)
        if alone:  # it may be a part of a split: "train[:3]"
            own = str(dataset.split or "train")
            part = re.fullmatch(r"([\w.]+)\[[^+]*\]", own)
            splits = dict.fromkeys([own, *(part.groups() if part else ())], dataset)
        split = options.pop("split", next(iter(splits)) if alone else "train")
        if options or split not in splits:
            raise InputError(
                f"data.source: {source}: a saved dataset takes no option but split, and {name} has {', '.join(splits)}"
            )
        yield from splits[split]
    else:
        yield from datasets.load_dataset(name, **{"split": "train", **options})


def name_and_options(spec: str, source: str) -> tuple[str, dict[str, Any]]:
    """The parts of "name?key=value&key=value", the values parsed as YAML. Raises ValueError (one line) that names
    `source`."""
    name, _, query = spec.partition("?")
    options: dict[str, Any] = {}
    for item in filter(None, query.split("&")):
        key, _, value = item.partition("=")
        try:
            options[key] = value if key in TEXT_OPTIONS else yaml.safe_load(value)
        except yaml.YAMLError:  # data_files=*.jsonl
            options[key] = value
    return name, options


def reasoning_gym_dataset(name: str, options: dict[str, Any]) -> Any:
    """The reasoning-gym dataset `name`; `options` are fields of its configuration. Raises ValueError (one line) where
    the package is missing, and for a name or an option that it refuses."""
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise InputError(
            f"data.source: {REASONING_GYM}{name}: {error}; pip install 'dynamo-megatron[reasoning-gym]'"
        ) from None
    try:
        return reasoning_gym.create_dataset(name, **options)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputError(f"data.source: {REASONING_GYM}{name} refuses {options}: {error_line(error)}") from error


def _reasoning_gym_prompts(source: str) -> Iterator[tuple[str, Prompt]]:
    name, options = name_and_options(source.removeprefix(REASONING_GYM), source)
    options = {"seed": 0, **options}
    dataset = reasoning_gym_dataset(name, options)
    # The hash of the resolved configuration: ids change with a default that an upgrade changed, but not where a default
    # is written out.
    digest = _digest(name, dataclasses.asdict(dataset.config))
    for index in range(len(dataset)):
        entry = dataset[index]
        meta = {"reasoning_gym": {"dataset": name, "options": options, "entry": entry}}
        prompt_id = f"{name}-{digest}/{index}"
        prompt = Prompt(prompt_id, text=entry["question"], answer=entry["answer"], source=source, meta=meta)
        yield f"{source} entry {index}", prompt


def _plain(value: Any) -> Any:
    return sorted(map(repr, value)) if isinstance(value, set | frozenset) else str(value)


def _digest(*values: Any) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of plain data, or of sets of texts or numbers."""
    try:
        canonical = json.dumps(values, sort_keys=True, ensure_ascii=False, default=_plain)
    except TypeError:  # keys that JSON has not
        canonical = repr(values)
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()[:16]
