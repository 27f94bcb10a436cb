"""What the reward `json_schema` makes of responses and of schemas."""

import json

import pytest

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
        ([1], r"needs a JSON Schema as the answer, not \[1\]"),
        ({"properties": {"day": {"format": "date"}}}, "#/properties/day/format: .date. should not be valid"),
        ({"anyOf": [{}, {"mimimum": 3}]}, "#/anyOf/1: Unevaluated .*.mimimum. was unexpected"),
        ({"$defs": {"day": {"typ": "x"}}}, r"#/\$defs/day: Unevaluated .*.typ. was unexpected"),
        ({"type": "text"}, "#/type: 'text' is not valid"),
        ({"pattern": "("}, "#/pattern: '[(]' is not a 'regex'"),
        ({"contentEncoding": "base64"}, "#/contentEncoding: .* should not be valid"),
        ({"allOf": [{"$ref": "#"}]}, "a reference leads to nothing, or back to itself [(]RecursionError"),
        ({"$ref": "#/$defs/x"}, "a reference leads to nothing, or back to itself .*#/[$]defs/x"),
    ],
)
def test_a_schema_that_cannot_be_checked_is_an_error_whatever_the_response(schema, says):
    for response in ("", "1", '{"name": "Ada"}'):
        with pytest.raises(ValueError, match=says):
            reward(schema, response)


def test_a_number_that_is_too_large_is_wrong():
    assert reward({"multipleOf": 0.01}, "1" * 400) == 0.0


def test_a_reference_to_nothing_is_an_error():
    with pytest.raises(Exception, match=r"https://example[.]com/a"):
        reward({"items": {"$ref": "https://example.com/a"}}, "[1]")
