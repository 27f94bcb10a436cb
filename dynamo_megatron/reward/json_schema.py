"""The built-in reward `json_schema`: does the response hold JSON that the row's JSON Schema allows?"""

from __future__ import annotations

import functools
import graphlib
import json
from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from dynamo_megatron.reward.extraction import after_thinking, fenced, tagged
from dynamo_megatron.types import Prompt

UNCHECKED = ("format", "dependencies", "$recursiveRef", "contentEncoding", "contentMediaType", "contentSchema")
# Their schemas are about the same value, those of other keywords about what is in it.
SAME_VALUE = frozenset(("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas"))
# The draft's schema of schemas, which would pass over keywords that it does not know, and those that the library does
# not check (`format` would need other packages). The anchor makes it hold for the schemas in a schema, too.
STRICT = Draft202012Validator(
    {
        "$id": "https://strict.invalid/schema",
        "$dynamicAnchor": "meta",
        "$ref": Draft202012Validator.META_SCHEMA["$id"],
        "properties": {key: {"not": {}} for key in UNCHECKED},
        "unevaluatedProperties": False,
    },
    format_checker=Draft202012Validator.FORMAT_CHECKER,
)


def json_schema(prompt: Prompt, response: str) -> float:
    """1.0 where `response` holds one JSON value that the schema `prompt.answer` (an object, or its JSON text) allows,
    else 0.0. The value is the last complete fenced block marked as JSON (else the last unmarked one), else the content
    of the last `<answer>` tag, else all of the text after the thinking. Raises ValueError for what is no schema, or has
    a keyword that is not supported, or a reference to nothing in it or, for the same value, back to itself."""
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
    if faults := list(STRICT.iter_errors(schema)):
        fault = max(faults, key=lambda error: len(error.absolute_path))  # what is in it is its fault, too
        place = "/".join(["#", *map(str, fault.absolute_path)])
        raise ValueError(f"the reward json_schema: the row's schema: {place}: {fault.message}")
    resource = DRAFT202012.create_resource(schema)
    applied: dict[int, list[int]] = {}
    try:
        _follow(resource, Registry().resolver_with_root(resource), applied)
        graphlib.TopologicalSorter(applied).prepare()
    except Unresolvable as error:
        raise ValueError(f"the reward json_schema: the row's schema: a $ref to nothing in it: {error!s:.200}") from None
    except graphlib.CycleError:
        raise ValueError("the reward json_schema: the row's schema: a $ref leads back to itself, without end") from None
    if not applied.keys() >= set().union(*applied.values()):
        raise ValueError("the reward json_schema: the row's schema: a $ref names no schema")
    return Draft202012Validator(schema, registry=Registry())  # fetches nothing


def _follow(resource: Any, resolver: Any, applied: dict[int, list[int]]) -> None:
    """Puts into `applied`, for the id() of a schema and each in it, those of the schemas that it applies to the same
    value. Raises Unresolvable for a reference to nothing in the schema."""
    schema = resource.contents
    here = applied[id(schema)] = []
    if isinstance(schema, bool):
        return
    here += [id(resolver.lookup(schema[key]).contents) for key in ("$ref", "$dynamicRef") if key in schema]
    same = DRAFT202012.create_resource({key: schema[key] for key in SAME_VALUE & schema.keys()})
    here += [id(inner.contents) for inner in same.subresources()]
    for inner in resource.subresources():
        _follow(inner, resolver.in_subresource(inner), applied)
