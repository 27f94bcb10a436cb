"""YAML files and `key=value` composed left to right into one Config, with the origin of every key."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from dynamo_megatron.config import Config


class ConfigError(ValueError):
    """A configuration that is refused; the message is one line."""


def compose(
    files: Sequence[str], overrides: Sequence[str], defaults: Mapping[str, Any] | None = None
) -> tuple[Config, dict[str, str]]:
    """The config, and for every dotted key that was set the file or override that set it last.

    `defaults`: sections that files and overrides are merged into. Raises ConfigError: a file that is missing or not
    YAML, an unknown key (with the nearest known one), a wrong type.
    """
    tree: dict[str, Any] = {}
    origins: dict[str, str] = {}
    _merge(tree, defaults or {}, (), "the command", origins)
    for file in files:
        _merge(tree, _read(file), (), file, origins)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"{override!r}: neither a file nor key=value")
        nested = _parse(text, f"{key}=")
        for part in reversed(key.split(".")):
            nested = {part: nested}
        _merge(tree, nested, (), "the command line", origins)
    try:
        return Config.model_validate(tree), origins
    except ValidationError as error:
        raise ConfigError(_one_line(error, origins)) from None


def _read(file: str) -> dict[str, Any]:
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"{file}: no such config file (a single key is set with key=value)")
    try:
        content = _parse(path.read_text(encoding="utf-8"), file)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text ({error})") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: a config is a mapping of sections, this is a {type(content).__name__}")
    return content


def _parse(text: str, what: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{what}{line}: not YAML ({getattr(error, 'problem', None) or error})") from None


def _merge(into: dict, new: Mapping, at: tuple[str, ...], origin: str, origins: dict[str, str]) -> None:
    for name, value in new.items():
        path = (*at, str(name))
        known = _fields(_type_at(path[:-1]))
        if name not in known:
            raise ConfigError(f"{origin}: unknown key {'.'.join(path)}{_nearest(path)}")
        if isinstance(value, Mapping) and _fields(_type_at(path)):
            if not isinstance(into.get(name), dict):
                into[name] = {}
            _merge(into[name], value, path, origin, origins)
        else:
            into[name] = value
            origins[".".join(path)] = origin


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


def _nearest(path: tuple[str, ...]) -> str:
    siblings = difflib.get_close_matches(path[-1], _fields(_type_at(path[:-1])), 1, cutoff=0.6)
    if siblings:
        return f"; did you mean {'.'.join((*path[:-1], siblings[0]))}?"
    ranked = sorted(_all_keys(), key=lambda key: -difflib.SequenceMatcher(None, ".".join(key), ".".join(path)).ratio())
    elsewhere = [key for key in ranked if key[-1] == path[-1]] or ranked
    return f"; the nearest key is {'.'.join(elsewhere[0])}"


def _one_line(error: ValidationError, origins: Mapping[str, str]) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return f"{key}: missing; set it in a config file or with {key}=..."
    origin = next((origins[k] for k in (key, key.rpartition(".")[0]) if k in origins), None)
    where = f" (set by {origin})" if origin else ""
    given = "" if first["type"] == "value_error" else f", got {first['input']!r}"
    return f"{key}: {message}{given}{where}" if key else f"{message}{where}"


def to_plain(config: Config) -> dict[str, Any]:
    """The config as plain data, as `config.yaml` holds it."""
    return TypeAdapter(Config).dump_python(config, mode="json")


def describe(config: Config, origins: Mapping[str, str], derived: Mapping[str, Any]) -> str:
    """Every key with its value and who set it, then what follows from them."""
    lines: list[str] = []

    def walk(node: Any, at: tuple[str, ...]) -> None:
        for name, value in node.items():
            path, indent = (*at, name), "  " * len(at)
            if isinstance(value, dict) and value:
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
    "algorithm",
    "rollout.temperature",
    "rollout.max_new_tokens",
    "rollout.stop",
)


def identity(plain: Mapping[str, Any], keys: Sequence[str] = _IDENTITY) -> dict[str, Any]:
    """dotted key -> value of all that `keys` names, by default what may not change when a run is resumed; `plain` as
    from `to_plain`."""
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
    if "data.shuffle_seed" in found and found["data.shuffle_seed"] is None:
        found["data.shuffle_seed"] = plain.get("seed")
    return found
