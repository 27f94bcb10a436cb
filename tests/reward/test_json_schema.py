"""What the reward `json_schema` makes of responses and of schemas."""

import json

import pytest
from referencing.exceptions import Unresolvable

from dynamo_megatron.reward.json_schema import json_schema
from dynamo_megatron.types import Prompt


def reward(schema, response):
    return json_schema(Prompt("p", text="?", answer=schema), response)


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "knows": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ('{"name": "Ada"}', 1.0),
        ('<think>{"name": 1}</think> {"name": "Ada", "knows": [{"name": "Bo"}]}\n', 1.0),
        ('Here:\n```json\n{"name": "Ada"}\n```\nand no more', 1.0),
        ('```json\n{"name": 1}\n```\nor\n```json\n{"name": "Ada"}\n```', 1.0),
        ('It is <answer>{"name": "Ada"}</answer>.', 1.0),
        ('Here: {"name": "Ada"}', 0.0),  # what the caller of json.loads would get
        ('{"name": "Ada", "knows": [{"name": 7}]}', 0.0),
        ('{"name": "Ada", "age": 36}', 0.0),
        ('<think>{"name": "Ada"}', 0.0),
        ("", 0.0),
        ('{"name": NaN}', 0.0),
        ("[" * 100_000, 0.0),
        ('{"name": "a", "knows": [' * 100_000 + "]}" * 100_000, 0.0),
        ("9" * 10_000, 0.0),
    ],
)
def test_the_json_of_a_response(response, value):
    assert reward(PERSON, response) == reward(json.dumps(PERSON), response) == value


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (None, "needs a JSON Schema as the answer, not null"),
        ("{", "needs a JSON Schema as the answer, not {"),
        ([1], r"needs a JSON Schema as the answer, not \[1\]"),
        ({"properties": {"day": {"format": "date"}}}, "#/properties/day/format: .date. should not be valid"),
        (
            {"anyOf": [{}, {"mimimum": 3}]},
            "#/anyOf/1: Unevaluated .*.mimimum. was unexpected",
        ),
        ({"$defs": {"day": {"typ": "x"}}}, r"#/\$defs/day: Unevaluated .*.typ. was unexpected"),
        ({"if": {"typ": "null"}}, "#/if: Unevaluated .*.typ. was unexpected"),
        ({"type": "text"}, "#/type: 'text' is not valid"),
        ({"properties": {"name": "string"}}, "#/properties/name: 'string' is not of type"),
        ({"pattern": "("}, "#/pattern: '[(]' is not a 'regex'"),
    ],
)
def test_a_schema_that_cannot_be_checked_is_an_error_whatever_the_response(schema, says):
    for response in ("", "1", '{"name": "Ada"}'):
        with pytest.raises(ValueError, match=says):
            reward(schema, response)


@pytest.mark.parametrize("reference", ["#/$defs/person", "https://example.com/schema"])
def test_a_reference_to_what_is_not_in_the_schema_is_an_error(reference):
    with pytest.raises(Unresolvable):
        reward({"properties": {"name": {"$ref": reference}}}, '{"name": 1}')
