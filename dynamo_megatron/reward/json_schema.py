"""The built-in reward `json_schema`: does the response hold JSON that the row's JSON Schema allows?"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jsonschema import Draft202012Validator, SchemaError
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from dynamo_megatron.reward.extraction import after_thinking, fenced, tagged
from dynamo_megatron.types import Prompt

# Those of the library, and those that it knows without a function. `format` would check nothing without other packages.
KEYWORDS = {
    *Draft202012Validator.VALIDATORS.keys() - {"format", "$dynamicRef"},
    *("then", "else", "minContains", "maxContains"),
    *("$schema", "$comment", "$defs", "title", "description", "default", "examples"),
}
VALUES = ("const", "enum", "default", "examples", "dependentRequired")  # hold no schemas
BY_NAME = ("$defs", "properties", "patternProperties", "dependentSchemas")  # hold schemas by names of the user's


def json_schema(prompt: Prompt, response: str) -> float:
    """1.0 where `response` holds one JSON value that the schema `prompt.answer` (an object, or its JSON text) allows,
    else 0.0. The value is the last complete fenced block marked as JSON (else the last unmarked one), else the content
    of the last `<answer>` tag, else all of the text after the thinking. Raises ValueError for what is no schema, or has
    a keyword that is not supported."""
    schema = prompt.answer if isinstance(prompt.answer, str) else json.dumps(prompt.answer)
    validator = _validator(schema)
    text = after_thinking(response) or ""
    found = next((each for each in (fenced(text, ("json",)), tagged(text)) if each is not None), text)
    try:
        return float(validator.is_valid(json.loads(found, parse_constant=_refuse)))
    except (ValueError, RecursionError):  # a response may be nested however deeply
        return 0.0


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


@functools.lru_cache(1024)
def _validator(text: str) -> Draft202012Validator:
    try:
        schema = json.loads(text)
    except ValueError:
        schema = None
    if not isinstance(schema, Mapping):
        raise ValueError(f"the reward json_schema needs a JSON Schema as the answer, not {text:.200}")
    validator = Draft202012Validator(schema, registry=Registry())  # fetches nothing
    lookup = Registry().with_resource("", DRAFT202012.create_resource(schema)).resolver().lookup
    fault = next(_faults(schema, lookup, "#"), None)
    try:
        if fault is None:
            Draft202012Validator.check_schema(schema)
            list(validator.iter_errors(None))
    except SchemaError as error:
        fault = f"{'/'.join(['#', *map(str, error.absolute_path)])}: {error.message}"
    except RecursionError:
        fault = "a $ref leads back to itself for the same value, without end"
    if fault is not None:
        raise ValueError(f"the reward json_schema: the row's schema: {fault}")
    return validator


def _faults(schema: Any, lookup: Callable[[str], Any], at: str) -> Iterator[str]:
    """What the library passes over: keywords that it does not know, and references to nothing that no value meets.
    `lookup` raises Unresolvable for these; `at` is the place of `schema`, which may be a list of schemas."""
    if isinstance(schema, list):
        for number, one in enumerate(schema):
            yield from _faults(one, lookup, f"{at}/{number}")
    for name, given in schema.items() if isinstance(schema, Mapping) else ():
        place = f"{at}/{name}"
        if name not in KEYWORDS:
            yield f"{place}: this keyword is not supported"
        elif name == "$ref" and isinstance(given, str):
            try:
                lookup(given)
            except Unresolvable:
                yield f"{place}: {given!r:.80} is not in the schema"
        elif name in BY_NAME and isinstance(given, Mapping):
            for inner, one in given.items():
                yield from _faults(one, lookup, f"{place}/{inner}")
        elif name not in VALUES:
            yield from _faults(given, lookup, place)
