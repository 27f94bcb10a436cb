"""Messages in the form that sessions compare and render."""

import pytest

from dynamo_megatron.rollout.agents.messages import BadRequest, checked_tools, normalised


def test_clients_forms_of_one_message_are_the_same():
    sent = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert normalised([sent]) == normalised([{"role": "user", "content": "ab", "name": None}])
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []}
    (message,) = normalised([answer])
    assert message["content"] == "" and message["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert normalised([{**answer, "content": "", "tool_calls": message["tool_calls"]}]) == [message]
    assert normalised([{"role": "developer", "content": "x"}])[0]["role"] == "system"


def test_arguments_that_are_no_json_stay_as_they_are():
    call = {"id": "1", "function": {"name": "add", "arguments": "{broken"}}
    (message,) = normalised([{"role": "assistant", "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"]["arguments"] == "{broken"


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([], "at least one"),
        ("hello", "at least one"),
        (["hello"], "not an object"),
        ([{"role": "robot", "content": ""}], "'robot' is none of"),
        ([{"role": "user", "content": 3}], "neither a text nor a list"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "no text"),
        ([{"role": "user", "tool_calls": [{}]}], "of an assistant's message"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "without a function's name"),
    ],
)
def test_what_is_no_message_is_refused(messages, why):
    with pytest.raises(BadRequest, match=why):
        normalised(messages)


@pytest.mark.parametrize(
    "tools", ["add", ["add"], [{"type": "retrieval"}], [{"type": "function", "function": {"parameters": {}}}]]
)
def test_what_is_no_tool_is_refused(tools):
    with pytest.raises(BadRequest, match="tools"):
        checked_tools(tools)


def test_no_tools_are_none():
    assert checked_tools([]) is None and checked_tools(None) is None
