"""The built-in reward `json_schema`: does the response hold JSON that the row's JSON Schema allows?"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dynamo_megatron.reward.extraction import after_thinking, fenced, tagged
from dynamo_megatron.types import Prompt

Schema = Mapping[str, Any] | bool
NUMBER = (int, float)
TYPES = {"object": dict, "array": list, "string": str, "number": NUMBER, "boolean": bool, "null": type(None)}
# Keywords that say nothing about a value. `$defs` holds what `$ref` names.
ANNOTATIONS = {"$schema", "$id", "$comment", "$defs", "title", "description", "default", "examples"}
# keyword: (type of what the schema gives, type of the values that it is about, whether a value fits)
LIMITS: dict[str, tuple[Any, Any, Callable[[Any, Any], bool]]] = {
    "type": ((str, list), object, lambda value, kinds: any(_is(value, k) for k in _listed(kinds))),
    "enum": (list, object, lambda value, allowed: _comparable(value) in map(_comparable, allowed)),
    "const": (object, object, lambda value, only: _comparable(value) == _comparable(only)),
    "minimum": (NUMBER, NUMBER, operator.ge),
    "maximum": (NUMBER, NUMBER, operator.le),
    "exclusiveMinimum": (NUMBER, NUMBER, operator.gt),
    "exclusiveMaximum": (NUMBER, NUMBER, operator.lt),
    "minLength": (int, str, lambda value, least: len(value) >= least),
    "maxLength": (int, str, lambda value, most: len(value) <= most),
    "pattern": (str, str, lambda value, pattern: re.search(pattern, value) is not None),
    "minItems": (int, list, lambda value, least: len(value) >= least),
    "maxItems": (int, list, lambda value, most: len(value) <= most),
    "uniqueItems": (bool, list, lambda value, wanted: not wanted or len(set(map(_comparable, value))) == len(value)),
    "minProperties": (int, dict, lambda value, least: len(value) >= least),
    "maxProperties": (int, dict, lambda value, most: len(value) <= most),
    "required": (list, dict, lambda value, names: all(name in value for name in names)),
}
# keyword: type of what the schema gives; with schemas inside, that `_fits` applies
APPLIED = {
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), list),
    **dict.fromkeys(("not", "items", "additionalProperties"), (Mapping, bool)),
    "properties": Mapping,
    "$ref": str,
}
FILLED = ("type", "enum", "allOf", "anyOf", "oneOf")  # an empty list would mean nothing


def json_schema(prompt: Prompt, response: str) -> float:
    """1.0 where `response` holds one JSON value that the schema `prompt.answer` (an object, or its JSON text) allows,
    else 0.0. The value is the last complete fenced block marked as JSON (else the last unmarked one), else the content
    of the last `<answer>` tag, else all of the text after the thinking. Raises ValueError for what is no schema, or has
    a keyword that is not supported."""
    schema = prompt.answer
    try:
        schema = json.loads(schema) if isinstance(schema, str) else schema
    except ValueError:
        schema = None
    if not isinstance(schema, Mapping):
        raise ValueError(f"the reward json_schema needs a JSON Schema as the answer, not {prompt.answer!r:.200}")
    for fault in _faults(schema, schema, "#"):
        raise ValueError(f"the reward json_schema: the row's schema: {fault}")
    text = after_thinking(response) or ""
    found = next((each for each in (fenced(text, ("json",)), tagged(text)) if each is not None), text)
    try:
        return float(_fits(json.loads(found, parse_constant=_refuse), schema, schema))
    except (ValueError, RecursionError):  # a response may be nested however deeply
        return 0.0


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _faults(schema: Any, root: Mapping, at: str) -> Iterator[str]:
    """What is wrong with a schema and those in it; `at` is its place in `root`."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        yield f"{at} is no schema: {schema!r:.80}"
        return
    for name, given in schema.items():
        place = f"{at}/{name}"
        if name in ("$defs", "properties") and isinstance(given, Mapping):
            for inner, one in given.items():
                yield from _faults(one, root, f"{place}/{inner}")
        elif name in ANNOTATIONS:
            continue
        elif name not in LIMITS and name not in APPLIED:
            yield f"{place}: this keyword is not supported (docs/rewards.md has those that are)"
        elif not _can_be(name, given):
            yield f"{place}: cannot be {given!r:.80}"
        elif name == "$ref":
            if _referred(root, given) is None:
                yield f"{place}: {given!r:.80} names no schema in it; it can be '#' or '#/$defs/NAME'"
            elif _returns(schema, root):
                yield f"{place}: {given!r:.80} leads back here for the same value, without end"
        elif name == "type" and not all(kind in (*TYPES, "integer") for kind in _listed(given)):
            yield f"{place}: {given!r:.80} is no type of JSON"
        elif name == "pattern":
            try:
                re.compile(given)
            except re.error as error:
                yield f"{place}: not a regular expression: {error}"
        elif name in APPLIED:
            for number, one in enumerate(_listed(given)):
                yield from _faults(one, root, f"{place}/{number}" if isinstance(given, list) else place)


def _can_be(name: str, given: Any) -> bool:
    """Whether a schema may give `given` as the value of the keyword `name`."""
    kind = LIMITS[name][0] if name in LIMITS else APPLIED[name]
    if name == "required":
        return isinstance(given, list) and all(isinstance(each, str) for each in given)
    return _is(given, "integer") if kind is int else _of(given, kind) and not (given == [] and name in FILLED)


def _returns(schema: Mapping, root: Mapping) -> bool:
    """Whether checking a value by `schema` checks the same value by `schema` again."""
    met: list[Any] = []
    ahead: list[Any] = [schema]
    while ahead:
        if isinstance(at := ahead.pop(), Mapping):
            applied = [one for name in ("allOf", "anyOf", "oneOf", "not") for one in _listed(at.get(name, []))]
            applied += [_referred(root, str(at["$ref"]))] if "$ref" in at else []
            new = [one for one in applied if not any(one is each for each in met)]
            met, ahead = met + new, ahead + new
    return any(one is schema for one in met)


def _fits(value: Any, schema: Schema, root: Mapping) -> bool:
    """Whether `schema`, which is without faults, allows a value that was parsed from JSON."""
    if isinstance(schema, bool):
        return schema
    for name, (_, about, holds) in LIMITS.items():
        if name in schema and _of(value, about) and not holds(value, schema[name]):
            return False
    if "$ref" in schema and not _fits(value, _referred(root, schema["$ref"]), root):
        return False
    if "not" in schema and _fits(value, schema["not"], root):
        return False
    for name, count in (("allOf", all), ("anyOf", any), ("oneOf", lambda fitting: sum(fitting) == 1)):
        if name in schema and not count(_fits(value, one, root) for one in schema[name]):
            return False
    return all(_fits(inner, one, root) for inner, one in _inside(value, schema))


def _inside(value: Any, schema: Mapping) -> Iterator[tuple[Any, Schema]]:
    """The members of an object or array, each with its schema."""
    if isinstance(value, dict):
        known = schema.get("properties", {})
        for name, inner in value.items():
            yield inner, known[name] if name in known else schema.get("additionalProperties", True)
    elif isinstance(value, list):
        first = schema.get("prefixItems", [])
        yield from zip(value, first, strict=False)
        yield from ((inner, schema.get("items", True)) for inner in value[len(first) :])


def _referred(root: Mapping, reference: str) -> Schema | None:
    """The schema in `root` that "#" or "#/$defs/NAME" names; None where there is none."""
    if reference == "#":
        return root
    defs, name = root.get("$defs"), reference.removeprefix("#/$defs/")
    found = defs.get(name) if isinstance(defs, Mapping) and name != reference else None
    return found if isinstance(found, Mapping | bool) else None


def _listed(given: Any) -> list:
    return given if isinstance(given, list) else [given]


def _of(value: Any, kind: Any) -> bool:
    """isinstance, except that true is no number."""
    return isinstance(value, kind) and not (kind == NUMBER and isinstance(value, bool))


def _is(value: Any, kind: str) -> bool:
    if kind == "integer":
        return _of(value, NUMBER) and value == value // 1
    return _of(value, TYPES[kind])


def _comparable(value: Any) -> Any:
    """Hashable, and equal for values that are equal in JSON: 1 and 1.0, but not 1 and true."""
    if isinstance(value, dict):
        return "object", frozenset((name, _comparable(inner)) for name, inner in value.items())
    if isinstance(value, list):
        return "array", tuple(map(_comparable, value))
    return ("boolean", value) if isinstance(value, bool) else value
