"""The tables of docs/configuration.md, which `make docs` rewrites: all keys, from the configuration's types, defaults
and comments, and the names of verl and slime."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from dynamo_megatron.config import Config
from dynamo_megatron.config.peer_keys import OURS

DOCUMENT = Path(__file__).parents[1] / "docs" / "configuration.md"
LONGEST_DEFAULT = 80  # characters; a longer text is in the code
SHORT = {str: "string", int: "integer", float: "number", bool: "true or false"}


def rows(section: Any, at: tuple[str, ...] = ()) -> Iterator[str]:
    """A line for every key; of sections for those that may be null."""
    comments = comments_of(section)
    for name, field in section.__pydantic_fields__.items():
        key = (*at, field.alias or name)
        inner = section_of(field.annotation)
        comment = comments.get(name, "") or (inspect.getdoc(inner) or "" if inner else "")
        comment = re.sub(r"\bNone\b", "null", " ".join(comment.split())).replace("|", "\\|")
        kind, default = kind_of(field.annotation), "required"
        if not field.is_required() and inner is None:
            ordinary = None if field.default_factory else field.default
            text = yaml.safe_dump(ordinary, default_flow_style=True, width=10**6).strip().removesuffix("...")
            default = f"`{text.strip()}`" if len(text) <= LONGEST_DEFAULT else "a long string"
            default = "depends" if field.default_factory else default
        elif inner is not None:
            kind, default = "section or `null`", "`null`" if field.default is None else "the section"
        if inner is None or type(None) in typing.get_args(field.annotation):
            yield f"| `{'.'.join(key)}` | {kind} | {default} | {comment} |"
        if inner is not None:
            yield from rows(inner, key)


def section_of(kind: Any) -> Any:
    """The section's type, of an optional one too; None for a plain value."""
    return next((o for o in typing.get_args(kind) or (kind,) if hasattr(o, "__pydantic_fields__")), None)


def kind_of(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(kind_of(argument) for argument in arguments if argument is not type(None))
    if origin in (list, tuple):
        return f"list of {kind_of(arguments[0])}"
    return "mapping" if origin is dict else kind_of(arguments[0]) if arguments else SHORT.get(kind) or str(kind)


def comments_of(section: Any) -> dict[str, str]:
    """name -> the comment on the field's line, or else on the lines above it; of inherited fields too."""
    found, above = {}, ""
    own = [kind for kind in reversed(section.__mro__) if kind.__module__.startswith("dynamo_megatron")]
    for line in "".join(map(inspect.getsource, own)).splitlines():
        text = line.partition("  # ")[2]
        if start := re.match(r"    (\w+): ", line):
            found[start[1]], above = text or above, ""
        else:
            comment = re.match(r"    # (.*)", line)
            above = f"{above} {comment[1]}".strip() if comment else ""
    return found


def names() -> Iterator[str]:
    """A line for each of our names with those of verl and slime."""
    for here, theirs in OURS.items():
        words = theirs.split()
        verl = ", ".join(f"`{word}`" for word in words if not word.startswith("--"))
        slime = ", ".join(f"`{word}`" for word in words if word.startswith("--"))
        yield f"| {verl} | {slime} | {here} |"


if __name__ == "__main__":
    page = DOCUMENT.read_text(encoding="utf-8")
    for part, head, lines in (
        ("keys", "| key | value | default | |\n|---|---|---|---|", rows(Config)),
        ("names", "| verl | slime | here |\n|---|---|---|", names()),
    ):
        table = "\n".join([head, *lines])
        marks = re.compile(rf"(<!-- generated: {part} -->\n).*?(<!-- /generated -->)", re.DOTALL)
        page = marks.sub(lambda found, table=table: f"{found[1]}{table}\n{found[2]}", page)
    DOCUMENT.write_text(page, encoding="utf-8")
