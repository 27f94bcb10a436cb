"""YAML files and `key=value` composed left to right into one Config, with the origin of every key."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import os
import reprlib
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from dynamo_megatron.config import Config, shipped
from dynamo_megatron.config.peer_keys import PREFIX, SECTIONS, last_part, whole_name
from dynamo_megatron.errors import InputError
from dynamo_megatron.runtime.credentials import in_urls
from dynamo_megatron.runtime.plain_text import on_one_line

MOST_VALUES = 100_000  # in a config
LONGEST_INTEGER = 1024  # bits: Python turns longer ones neither into a float nor, from some length on, into text


class ConfigError(InputError):
    """A configuration that is refused; the message has a line for each fault."""


def compose(
    files: Sequence[str], overrides: Sequence[str], defaults: Mapping[str, Any] | None = None, context: Any = None
) -> tuple[Config, dict[str, str]]:
    """The config, and for every dotted key that was set the file or override that set it last.

    `files`: paths, or names of shipped configurations (`methods/dynamo`). `defaults`: sections that files and overrides
    are merged into. `context`: EVALUATION or None. Raises ConfigError with every fault found, one line each: a file
    that is missing or not YAML, an unknown key (with the nearest known one, or ours for one of verl's or slime's), a
    wrong type, a missing key.
    """
    merged = _Merged()
    merged.add(defaults or {}, (), "the command")
    for file in files:
        with merged.collected():
            path, name = _locate(file)
            merged.add(read_yaml(path, name), (), name)
    for override in overrides:
        with merged.collected():
            merged.add(_nested(override), (), "the command line")
    if secrets := [f"{merged.origins.get(key, '')}: {key}: {text}".lstrip(": ") for key, text in in_urls(merged.tree)]:
        raise ConfigError("\n".join(dict.fromkeys(secrets)))  # before anything else shows the value
    unread = bool(merged.faults)  # what could not be read may have set what is missing now
    faults = merged.faults + merged.unknown
    try:
        config = Config.model_validate(merged.tree, context=context)
    except ValidationError as error:
        lines = list(_lines(error, merged.origins, set() if unread else merged.meant, missing=not unread))
        faults += lines or ([] if faults else [str(error)])
    if faults:
        raise ConfigError("\n".join(dict.fromkeys(map(on_one_line, faults))))
    return config, merged.origins


class _Merged:
    """What files and overrides have set so far, and what is wrong with them."""

    def __init__(self) -> None:
        self.tree: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.faults: list[str] = []  # files and overrides that could not be read
        self.unknown: list[str] = []
        self.meant: set[str] = set()  # keys of ours that unknown ones probably stand for

    @contextlib.contextmanager
    def collected(self) -> Iterator[None]:
        try:
            yield
        except ConfigError as error:
            self.faults.append(str(error))

    def add(self, new: Mapping, at: tuple[str, ...], origin: str) -> None:
        into = self.tree
        for part in at:
            into = into[part]
        for name, value in new.items():
            path = (*at, str(name))
            if str(name) not in _fields(_type_at(at)):
                self._refuse(path, value, origin)
            elif isinstance(value, Mapping) and _fields(_type_at(path)):
                into[name] = into[name] if isinstance(into.get(name), dict) else {}
                self.add(value, path, origin)
            else:
                into[name] = value
                self.origins[".".join(path)] = origin

    def _refuse(self, path: tuple[str, ...], value: Any, origin: str) -> None:
        """An unknown key; of a mapping each key in it that is one of a peer's, as of a pasted `actor_rollout_ref`."""
        inner = [(leaf, _theirs(".".join(leaf))) for leaf in _leaves(value, path)]
        theirs = [(leaf, found) for leaf, found in inner if found]
        whole = inner[0][0] if len(inner) == 1 and path[0] in SECTIONS else path
        for leaf, (here, text) in theirs or [(whole, _nearest(path))]:
            self.unknown.append(f"{origin}: unknown key {'.'.join(leaf)}{text}")
            self.meant.update(here)


def _leaves(value: Any, at: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(inner, (*at, str(name)))
    else:
        yield at


def _locate(word: str) -> tuple[Path, str]:
    """The file that a word of the command line names, and what messages call it. Raises ConfigError."""
    for name in (word, f"{word}.yaml"):
        if os.path.isfile(name):
            return Path(name), name
    if (path := shipped.path(word)) is not None:
        return path, f"{path.relative_to(shipped.folder()).with_suffix('')} (shipped)"
    if os.path.isdir(word):
        inside = ", ".join(sorted(file.name for file in Path(word).glob("*.yaml"))[:8])
        raise ConfigError(f"{word}: is a folder; name a config file in it{f': {inside}' if inside else ''}")
    if tuple(word.split(".")) in _all_keys():
        raise ConfigError(f"{word}: is a key, not a config file; set it with {word}=VALUE, without blanks around the =")
    raise ConfigError(f"{word}: no such config file, nor a shipped one{_nearest_file(word)}")


def _nearest_file(word: str) -> str:
    folder = Path(word).parent if os.path.isdir(Path(word).parent) else Path()
    own = [str(folder / file.name) for end in ("yaml", "yml") for file in folder.glob(f"*.{end}") if file.is_file()]
    by_stem = {os.path.splitext(name)[0]: name for name in (*shipped.names(), *own)}
    near = difflib.get_close_matches(os.path.splitext(word)[0], by_stem, 1)
    if near:
        return f"; did you mean {by_stem[near[0]]}?"
    return "; `dynamo-megatron configs` lists those; a single key is set with key=value"


def read_yaml(path: Path, name: str) -> dict[str, Any]:
    """The mapping that a file holds; empty for an empty file. Raises ConfigError that calls the file `name`."""
    try:
        content = _parse(path.read_text(encoding="utf-8"), name)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not UTF-8 text ({error})") from None
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{name}: a config is a mapping of sections, this is a {type(content).__name__}")
    return content


def _nested(override: str) -> dict[str, Any]:
    """`a.b=text` as {"a": {"b": value}}. Raises ConfigError."""
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"{override!r}: neither a file nor key=value")
    if not text.strip():
        raise ConfigError(f"{override}: no value; give {key}=VALUE, {key}=null for none or {key}='\"\"' for no text")
    nested = _parse(text, f"{key}={text}")
    for part in reversed(key.split(".")):
        nested = {part: nested}
    return nested


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in a mapping, of which YAML would keep the last, and aliases that multiply.
    Raises yaml.YAMLError alone, where PyYAML lets Python's own errors through (2026-99-99, 5,000 digits)."""

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None and _values(node, {}) > MOST_VALUES:
            why = f"its aliases stand for more than {MOST_VALUES} values"
            raise yaml.constructor.ConstructorError(problem=why, problem_mark=node.start_mark)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            valid = not isinstance(value, int) or value.bit_length() <= LONGEST_INTEGER
        except (ValueError, KeyError, AttributeError):
            valid = False
        if not valid:
            why = f"{reprlib.repr(node.value)} is not a valid {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(problem=why, problem_mark=node.start_mark)
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value in lines:
                why = f"the key {key.value} stands twice, first on line {lines[key.value]}"
                raise yaml.constructor.ConstructorError(problem=why, problem_mark=key.start_mark)
            lines[key.value] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


def _values(node: yaml.Node, seen: dict[int, float]) -> float:
    """Number of keys and values in a node with every alias written out; infinite where one is part of itself."""
    if id(node) not in seen:
        seen[id(node)] = math.inf
        inner = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        seen[id(node)] = 1 + (0 if isinstance(node, yaml.ScalarNode) else sum(_values(part, seen) for part in inner))
    return seen[id(node)]


def _parse(text: str, what: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise ConfigError(f"{on_one_line(what, 200)}: not YAML (too many levels of brackets or indentation)") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark and "=" not in what else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{on_one_line(what, 200)}{line}: not YAML ({on_one_line(problem, 200)})") from None


def _fields(kind: Any) -> dict[str, Any]:
    """name -> type of a section; nothing for a plain value."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {field.alias or name: field.annotation for name, field in kind.model_fields.items()}
    if dataclasses.is_dataclass(kind):
        return typing.get_type_hints(kind)
    for option in typing.get_args(kind):  # Section | None
        if fields := _fields(option):
            return fields
    return {}


def _type_at(path: tuple[str, ...]) -> Any:
    kind: Any = Config
    for name in path:
        kind = _fields(kind)[name]
    return kind


def _all_keys(kind: Any = Config, at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, field in _fields(kind).items():
        yield (*at, name)
        yield from _all_keys(field, (*at, name))


def _theirs(key: str) -> tuple[list[str], str] | None:
    """As `whole_name`; a key of verl may also be one of ours behind its prefix."""
    bare = key.removeprefix(PREFIX)
    if bare != key and tuple(bare.split(".")) in _all_keys():
        return [bare], f"; verl's {PREFIX} is left out here: {bare}"
    return whole_name(key)


def _nearest(path: tuple[str, ...]) -> tuple[list[str], str]:
    """Keys that were probably meant by an unknown one, and how to say so."""
    keys = list(_all_keys())
    if not (elsewhere := [".".join(key) for key in keys if key[-1] == path[-1]]):
        if siblings := difflib.get_close_matches(path[-1], _fields(_type_at(path[:-1])), 1, cutoff=0.7):
            near = ".".join((*path[:-1], siblings[0]))
            return [near], f"; did you mean {near}?"
        if path[0] in SECTIONS:
            return [], ", of verl; no key here corresponds to it"
        if found := last_part(path[-1]):
            return found
        names = difflib.get_close_matches(path[-1], {key[-1] for key in keys}, 1, cutoff=0.85)
        elsewhere = [".".join(key) for key in keys if key[-1] in names]
    if not elsewhere:
        return [], "; --print-config shows all keys"
    return [], f"; the nearest key is {difflib.get_close_matches('.'.join(path), elsewhere, 1, cutoff=0)[0]}"


def _lines(error: ValidationError, origins: Mapping[str, str], meant: set[str], missing: bool) -> Iterator[str]:
    """A line for each fault that pydantic has found, without keys missing for a reason that another line gives."""
    faults: dict[str, list[ErrorDetails]] = {}
    for fault in error.errors():  # a value of several types has one for each of them
        faults.setdefault(_key(fault["loc"]), []).append(fault)
    for key, (fault, *others) in faults.items():
        kind = None
        if fault["type"] in ("missing", "model_type", "dataclass_type") and isinstance(fault["loc"][-1], str):
            kind = _type_at(tuple(key.split(".")))
        if fault["type"] == "missing" and kind is not None:
            for needed in _required(kind, key) if missing else ():
                if not {needed, needed.partition(".")[0]} & meant:  # the key, or its section
                    yield f"{needed}: missing; set it in a config file or with {needed}=..."
            continue
        message = " or ".join([fault["msg"], *(other["msg"] for other in others)]).removeprefix("Value error, ")
        given = "" if fault["type"] == "value_error" else f", got {reprlib.repr(fault['input'])}"
        if kind is not None:
            message = f"is a section; give it keys ({', '.join(_fields(kind))})"
        if fault["type"] == "string_type" and fault["input"] is not None:
            given += f"; put a text that YAML takes for something else in quotes, as in {key}='\"...\"'"
        for one in message.split("\n"):  # a check across keys may have found several faults
            named = one.partition(":")[0]  # by a check across keys
            at = (key, key.rpartition(".")[0], f"{key}.{named}", named)
            origin = next((f"{origins[k]}: " for k in at if k in origins), "")
            yield f"{origin}{key}: {one}{given}" if key else f"{origin}{one}"


def _key(loc: Sequence[str | int]) -> str:
    """Dotted, without what pydantic adds for a value of several types."""
    kind: Any = Config
    parts = []
    for part in loc:
        fields = _fields(kind)
        if isinstance(part, str) and part not in fields:
            break
        parts.append(str(part))
        kind = fields[part] if isinstance(part, str) else None
    return ".".join(parts)


def _required(kind: Any, key: str) -> list[str]:
    """The keys without a default in a section that is missing, or the key itself."""
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return [key]
    return [f"{key}.{name}" for name, field in kind.model_fields.items() if field.is_required()]


def to_plain(config: Config) -> dict[str, Any]:
    """The config as plain data, as `config.yaml` holds it."""
    return TypeAdapter(Config).dump_python(config, mode="json")


def describe(config: Config, origins: Mapping[str, str], derived: Mapping[str, Any]) -> str:
    """Every key with its value and who set it, then what follows from them."""
    lines: list[str] = []

    def walk(node: Any, at: tuple[str, ...]) -> None:
        for name, value in node.items():
            path, indent = (*at, name), "  " * len(at)
            if isinstance(value, dict) and value and _fields(_type_at(path)):
                lines.append(f"{indent}{name}:")
                walk(value, path)
            else:
                text = yaml.safe_dump(value, default_flow_style=True, width=10**6).strip().removesuffix("\n...")
                lines.append(f"{indent}{name}: {text}  # {origins.get('.'.join(path), 'default')}")

    walk(to_plain(config), ())
    lines.append("# derived")
    lines.extend(f"#   {name}: {value}" for name, value in derived.items())
    return "\n".join(lines)


# What makes a run the same run: everything but steps, learning rate, layout, servers and logging.
_IDENTITY = (
    "model",
    "data",
    "seed",
    "reward.functions",
    "reward.fusion",
    "reward.success_threshold",
    "reward.format",
    "reward.code.score",
    "reward.code.tests",
    "reward.prime",
    "reward.judge.model",
    "reward.judge.template",
    "reward.judge.pattern",
    "reward.judge.range",
    "reward.judge.request",
    "reward.reward_model.path",
    "reward.reward_model.range",
    "algorithm",
    "rollout.agent",
    "rollout.temperature",
    "rollout.max_new_tokens",
    "rollout.max_staleness",
    "rollout.stop",
)


_REWARDS_WITH_SETTINGS = ("format", "code", "prime", "judge", "reward_model")  # in sections of their names


def identity(plain: Mapping[str, Any], keys: Sequence[str] = _IDENTITY) -> dict[str, Any]:
    """dotted key -> value of all that `keys` names, by default what may not change when a run is resumed, without
    the settings of rewards that are none of `reward.functions`; `plain` as from `to_plain`."""
    found: dict[str, Any] = {}

    def walk(node: Any, path: tuple[str, ...]) -> None:
        if isinstance(node, Mapping) and node:
            for name, value in node.items():
                walk(value, (*path, name))
        else:
            found[".".join(path)] = node

    for key in keys:
        node: Any = plain
        for part in key.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        walk(node, tuple(key.split(".")))
    if isinstance(functions := found.get("reward.functions"), list):
        unused = tuple(f"reward.{name}." for name in _REWARDS_WITH_SETTINGS if name not in functions)
        found = {key: value for key, value in found.items() if not key.startswith(unused)}
    if "data.shuffle_seed" in found and found["data.shuffle_seed"] is None:
        found["data.shuffle_seed"] = plain.get("seed")
    return found
