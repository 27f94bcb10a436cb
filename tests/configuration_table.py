"""The table of docs/configuration.md, from the configuration's types, defaults and comments:

python -P tests/configuration_table.py       # rewrites it
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dynamo_megatron.config import Config

DOCUMENT = Path(__file__).parents[1] / "docs" / "configuration.md"
SHORT = {str: "text", int: "integer", float: "number", bool: "true or false", type(None): "null"}


def generated() -> str:
    rows = [f"| `{key}` | {kind} | {default} | {comment} |" for key, kind, default, comment in _rows(Config, ())]
    return "\n".join(["| key | value | default | |", "|---|---|---|---|", *rows]) + "\n"


def document(text: str) -> str:
    """The page with its generated part as it is now."""
    found = re.compile(r"(<!-- generated -->\n).*?(<!-- /generated -->)", re.DOTALL)
    assert found.search(text)
    return found.sub(lambda marks: f"{marks[1]}{generated()}{marks[2]}", text)


def _rows(section: Any, at: tuple[str, ...]) -> Iterator[tuple[str, str, str, str]]:
    """(dotted key, kind of value, default, comment) of every key; of sections, those that may be null."""
    comments = _comments(section)
    for name, field in _fields(section).items():
        key = (*at, field.alias or name)
        inner = _section(field.annotation)
        comment = comments.get(name, "") or (inspect.getdoc(inner) or "" if inner else "")
        comment = re.sub(r"\bNone\b", "null", " ".join(comment.split())).replace("|", "\\|")
        if inner is None:
            default = "required" if field.is_required() else f"`{_text(field.default)}`"
            yield ".".join(key), _kind(field.annotation), default, comment
        else:
            if type(None) in typing.get_args(field.annotation):
                default = "`null`" if field.default is None else "the section"
                yield ".".join(key), "section or `null`", default, comment
            yield from _rows(inner, key)


def _fields(section: Any) -> dict[str, FieldInfo]:
    return section.model_fields if issubclass(section, BaseModel) else section.__pydantic_fields__


def _section(kind: Any) -> Any:
    """The section's type, of an optional one too; None for a plain value."""
    for option in typing.get_args(kind) or (kind,):
        if isinstance(option, type) and (issubclass(option, BaseModel) or dataclasses.is_dataclass(option)):
            return option
    return None


def _kind(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _kind(arguments[0])
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_kind(argument) for argument in arguments if argument is not type(None))
    if origin in (list, tuple):
        return f"list of {_kind(arguments[0])}"
    if origin is dict:
        return "mapping"
    return SHORT.get(kind) or str(kind)


def _text(default: Any) -> str:
    if isinstance(default, str) and "\n" in default:
        return json.dumps(default)  # YAML too, on one line
    return yaml.safe_dump(default, default_flow_style=True, width=10**6).strip().removesuffix("\n...")


def _comments(section: Any) -> dict[str, str]:
    """name -> the comment on the field's lines, or else on the lines above it."""
    found: dict[str, str] = {}
    above: list[str] = []
    name = ""
    for line in inspect.getsource(section).splitlines():
        text = line.partition("  # ")[2].strip()
        if start := re.match(r"    (\w+): ", line):
            name = start[1]
            found[name] = text or " ".join(above)
            above = []
        elif comment := re.match(r"    # (.*)", line):
            above.append(comment[1])
            name = ""
        elif line.startswith("     ") or line.strip() == ")":
            if name and text:
                found[name] = f"{found[name]} {text}".strip()
        else:
            name, above = "", []
    return found


if __name__ == "__main__":
    DOCUMENT.write_text(document(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
