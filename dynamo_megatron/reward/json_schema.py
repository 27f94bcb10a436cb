"""The built-in reward `json_schema`: does the response hold JSON that the row's JSON Schema allows?"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping

from jsonschema import Draft202012Validator
from referencing import Registry
from referencing.exceptions import Unresolvable

from dynamo_megatron.reward.extraction import after_thinking, fenced, tagged
from dynamo_megatron.runtime.plain_text import error_line
from dynamo_megatron.types import Prompt

UNCHECKED = ("format", "dependencies", "$recursiveRef", "contentEncoding", "contentMediaType", "contentSchema")
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
    of the last `<answer>` tag, else all of the text after the thinking. Raises ValueError for what is no schema, has a
    keyword that is not supported, or refers to itself without end, and referencing's Unresolvable where a part that
    only some values reach refers to nothing."""
    schema = prompt.answer if isinstance(prompt.answer, str) else json.dumps(prompt.answer)
    validator = _validator(schema)
    text = after_thinking(response) or ""
    found = next((each for each in (fenced(text, ("json",)), tagged(text)) if each is not None), text)
    try:
        return float(validator.is_valid(json.loads(found, parse_constant=_refuse)))
    except (ValueError, RecursionError, OverflowError):  # nested however deeply; a number too large for multipleOf
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
    validator = Draft202012Validator(schema, registry=Registry())  # fetches nothing
    try:
        validator.is_valid(None)  # a schema that recurs without end would give every response 0
    except (RecursionError, Unresolvable) as error:
        what = "a reference leads to nothing, or back to itself"
        raise ValueError(f"the reward json_schema: the row's schema: {what} ({error_line(error)})") from error
    return validator
