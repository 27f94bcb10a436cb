"""The reward `json_schema` against the library jsonschema, and what it makes of responses and of schemas."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dynamo_megatron.reward.json_schema import json_schema
from dynamo_megatron.types import Prompt

NUMBERS = st.integers(-3, 3) | st.sampled_from([0.0, 0.5, 1.0, -2.0, 2.5])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text("ab1", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
COUNTS = st.integers(0, 3) | st.just(2.0)
KINDS = st.sampled_from(["object", "array", "string", "number", "integer", "boolean", "null"])
LEAVES = {
    "type": KINDS | st.lists(KINDS, min_size=1, max_size=2, unique=True),
    "enum": st.lists(VALUES, min_size=1, max_size=3),
    "const": VALUES,
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), NUMBERS),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), COUNTS),
    "pattern": st.sampled_from(["a", "^b", "1$", "^(ab|1)+$"]),
    "uniqueItems": st.booleans(),
    "required": st.lists(st.sampled_from("abc"), max_size=2, unique=True),
    "$ref": st.just("#/$defs/one"),
    "title": st.just("a title"),
}


def some_of(fields, most=3):
    """Objects with at most `most` of the optional `fields`."""
    names = st.lists(st.sampled_from(sorted(fields)), max_size=most, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: fields[name] for name in chosen}))


def nested(inner):
    """Schemas with schemas inside."""
    lists = st.lists(inner, min_size=1, max_size=3)
    applied = {
        **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), lists),
        **dict.fromkeys(("not", "items", "additionalProperties"), inner),
        "properties": st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    }
    return some_of(LEAVES | applied, most=4)


SCHEMAS = st.recursive(st.booleans() | some_of(LEAVES), nested, max_leaves=6).filter(lambda one: isinstance(one, dict))


def reward(schema, response):
    return json_schema(Prompt("p", text="?", answer=schema), response)


@settings(max_examples=500, deadline=None)
@example({"prefixItems": [{"type": "null"}], "items": {"type": "integer"}}, {}, [[None, 1], [None, None], [1]])
@example({"minimum": 0, "exclusiveMaximum": 1}, {}, [0, 1, 0.5, True, False, "a"])
@example({"exclusiveMinimum": 0, "maximum": 1}, {}, [0, 1, 0.5, 1.5])
@example({"type": ["integer", "boolean"], "enum": [1, True]}, {}, [1, 1.0, True, 0.5, 2])
@example({"uniqueItems": True, "items": {"enum": [0, False, 1.0, 1]}}, {}, [[0, False], [1, 1.0], [1, True]])
@given(SCHEMAS, some_of({name: LEAVES[name] for name in LEAVES if name != "$ref"}), st.lists(VALUES, min_size=4))
def test_it_is_the_library_jsonschema(schema, one, values):
    jsonschema = pytest.importorskip("jsonschema")
    schema = {**schema, "$defs": {"one": one}}
    library = jsonschema.Draft202012Validator(schema)
    for value in values:
        assert reward(json.dumps(schema), json.dumps(value)) == library.is_valid(value), (schema, value)


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
        (None, "needs a JSON Schema as the answer, not None"),
        ("{", "needs a JSON Schema as the answer, not '{'"),
        ([1], r"needs a JSON Schema as the answer, not \[1\]"),
        ({"properties": {"day": {"format": "date"}}}, "#/properties/day/format: this keyword is not supported"),
        ({"anyOf": [{}, {"mimimum": 3}]}, "#/anyOf/1/mimimum: this keyword is not supported"),
        ({"$defs": {"day": {"typ": "x"}}}, r"#/\$defs/day/typ: this keyword is not supported"),
        ({"type": "text"}, "#/type: 'text' is no type of JSON"),
        ({"required": "name"}, "#/required: cannot be 'name'"),
        ({"properties": {"name": "string"}}, "#/properties/name is no schema: 'string'"),
        ({"$ref": "#/$defs/person"}, "names no schema in it"),
        ({"pattern": "("}, "#/pattern: not a regular expression"),
        ({"type": []}, r"#/type: cannot be \[\]"),
        ({"anyOf": []}, r"#/anyOf: cannot be \[\]"),
        ({"type": [{}]}, r"#/type: \[{}\] is no type of JSON"),
        ({"required": [[]]}, r"#/required: cannot be \[\[\]\]"),
        ({"minLength": 2.5}, "#/minLength: cannot be 2.5"),
        ({"properties": {"a": {"$ref": "#/properties"}}}, r"names no schema in it; it can be '#' or '#/\$defs/NAME'"),
        ({"allOf": [{"$ref": "#"}]}, "#/allOf/0/[$]ref: '#' leads back here for the same value"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"not": {"$ref": "#"}}}}, "#/[$]ref: .* leads back here"),
    ],
)
def test_a_schema_that_cannot_be_checked_is_an_error_whatever_the_response(schema, says):
    for response in ("", "1", '{"name": "Ada"}'):
        with pytest.raises(ValueError, match=says):
            reward(schema, response)
