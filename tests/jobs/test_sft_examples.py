"""Which tokens `sft` trains on: those of every answer, each after what the policy would be given for it."""

import json

import pytest
from agents_chat import make_tokenizer

from dynamo_megatron.config import Config, DataConfig
from dynamo_megatron.data.templates import PLAIN, encode_prompt
from dynamo_megatron.errors import InputError
from dynamo_megatron.jobs.sft import Answers, SFTJob
from dynamo_megatron.types import Prompt

TOKENIZER = make_tokenizer()
DATA, ENDS = DataConfig(source="x"), [TOKENIZER.eos_token_id]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
ARGUMENTS = {"a": 3, "b": 4}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'


def examples_of(prompt, tokenizer, data, ends):
    return Answers(tokenizer, data, ends).examples(prompt)


def said(role: str, content: str, **others) -> dict:
    return {"role": role, "content": content, **others}


def trained(example, tokenizer=TOKENIZER) -> str:
    return tokenizer.decode([token for token, wanted in zip(example.tokens, example.trained, strict=True) if wanted])


def test_all_answers_of_a_conversation_are_trained():
    messages = [said("system", "s"), said("user", "1"), said("assistant", "größer"), said("user", "2")]
    messages += [said("assistant", "and", finish_reason="length"), said("user", "3"), said("assistant", "the sum")]
    (example,) = examples_of(Prompt("p", messages), TOKENIZER, DATA, ENDS)
    assert trained(example) == "größer<|im_end|>andthe sum<|im_end|>"
    whole = TOKENIZER.apply_chat_template(messages, tokenize=False)
    assert TOKENIZER.decode(example.tokens) + "\n" == whole


def test_an_answer_beside_the_conversation_is_the_only_one_trained():
    messages = [said("user", "1"), said("assistant", "a"), said("user", "2")]
    (example,) = examples_of(Prompt("p", messages, answer="7", meta={"tools": TOOLS}), TOKENIZER, DATA, ENDS)
    assert trained(example) == "7<|im_end|>" and "Tools:" not in TOKENIZER.decode(example.tokens)
    with pytest.raises(InputError, match=r"^data\.answer_key: the completion of 'p' is 7, not text$"):
        examples_of(Prompt("p", messages, answer=7), TOKENIZER, DATA, ENDS)


def test_where_the_template_drops_earlier_thoughts_a_new_sequence_begins():
    tokenizer, thought = make_tokenizer(thinks=True), "<think>\nx\n</think>\n"
    messages = [said("user", "1"), said("assistant", f"{thought}a"), said("user", "2")]
    messages.append(said("assistant", f"{thought}b"))
    first, second = examples_of(Prompt("p", messages), tokenizer, DATA, ENDS)
    assert trained(first, tokenizer) == f"{thought}a<|im_end|>"
    assert trained(second, tokenizer) == f"{thought}b<|im_end|>"
    given = tokenizer.apply_chat_template(messages[:3], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(second.tokens) == f"{given}{thought}b<|im_end|>" and given.count("<think>") == 0


def test_the_template_s_own_end_is_trained_where_the_tokenizer_has_another_one():
    tokenizer = make_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"  # as Gemma's <eos>, beside <end_of_turn>
    ends = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    messages = [said("user", "1"), said("assistant", "a"), said("user", "2"), said("assistant", "b")]
    (example,) = examples_of(Prompt("p", messages), tokenizer, DATA, ends)
    assert trained(example, tokenizer) == "a<|im_end|>b<|im_end|>"
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(example.tokens) == whole.removesuffix("\n")
    greeted = [said("system", "s"), said("assistant", "hello"), *messages]
    assert trained(examples_of(Prompt("p", greeted), tokenizer, DATA, ends)[0], tokenizer) == "a<|im_end|>b<|im_end|>"
    for known, end in ((ends, "<|im_end|>"), (ends[:1], "<|endoftext|>")):
        (example,) = examples_of(Prompt("p", messages[:1], answer="7"), tokenizer, DATA, known)
        assert trained(example, tokenizer) == f"7{end}"
        plain = DataConfig(source="x", template="{prompt}")  # of `samples --pairs`
        (example,) = examples_of(Prompt("p", text="1", answer="7"), tokenizer, plain, known)
        assert trained(example, tokenizer) == f"7{end}"
        assert (Answers(tokenizer, DATA, known).other_end() is None) == (known == ends)
    task = [said("system", "s"), said("assistant", "c"), {"role": "tool", "content": "r"}, messages[1]]
    assert trained(examples_of(Prompt("p", task), tokenizer, DATA, ends)[0], tokenizer) == "c<|im_end|>a<|im_end|>"
    cut = [said("user", "1"), said("assistant", "", finish_reason="length")]
    with pytest.raises(InputError, match="nothing to train on"):
        examples_of(Prompt("p", cut), TOKENIZER, DATA, ENDS)
    with pytest.raises(InputError, match="no user speaks before the assistant"):
        examples_of(Prompt("p", [said("assistant", "hello")]), tokenizer, DATA, ends)


def test_messages_of_a_preference_are_rendered_as_those_of_a_conversation():
    call = {"function": {"name": "add", "arguments": json.dumps(ARGUMENTS)}}
    asked, answer = [said("user", "3 + 4")], said("assistant", "", tool_calls=[call])
    prompt, plain = Prompt("p", [*asked, answer, said("user", "")]), DataConfig(source="x", template="{prompt}")
    assert Answers(TOKENIZER, DATA, ENDS).text_of(prompt, asked, answer) == f"\n{CALL}"
    assert CALL in TOKENIZER.decode(encode_prompt(prompt, TOKENIZER, DATA))  # and those before it
    for joined in (" + call.function.arguments", " ~ call.function.arguments"):  # DeepSeek's takes the text
        tokenizer = make_tokenizer()
        tokenizer.chat_template = tokenizer.chat_template.replace(
            "call.function | tojson", f"call.function.name{joined}"
        )
        assert f"add{json.dumps(ARGUMENTS)}" in tokenizer.decode(encode_prompt(prompt, tokenizer, DATA))
        assert json.dumps(ARGUMENTS) in Answers(tokenizer, DATA, ENDS).text_of(prompt, asked, answer)
    with pytest.raises(InputError, match=r"^prompt 'p': tool_calls need data\.template: chat$"):
        Answers(TOKENIZER, plain, ENDS).text_of(prompt, asked, answer)


def test_thoughts_beside_the_content_are_trained_as_the_template_renders_them():
    tokenizer = make_tokenizer()
    shown = "('<think>' ~ message.reasoning_content ~ '</think>' if message.role == 'assistant') ~ message.content"
    tokenizer.chat_template = tokenizer.chat_template.replace("text = message.content", f"text = {shown}")
    messages = [said("user", "1"), said("assistant", "a", reasoning_content="x"), said("user", "2")]
    (example,) = examples_of(Prompt("p", [*messages, said("assistant", "b")]), tokenizer, DATA, ENDS)
    assert trained(example, tokenizer) == "<think>x</think>a<|im_end|>b<|im_end|>"
    call = said("assistant", "", tool_calls=[{"function": {"name": "add", "arguments": ARGUMENTS}}])
    (example,) = examples_of(Prompt("p", [messages[0], call]), tokenizer, DATA, ENDS)
    assert trained(example, tokenizer) == f"{CALL}<|im_end|>"  # not with the empty thoughts
    cut = said("assistant", "", reasoning_content="x", finish_reason="length")
    assert trained(examples_of(Prompt("p", [messages[0], cut]), tokenizer, DATA, ENDS)[0], tokenizer) == "<think>x"


@pytest.mark.parametrize("closes", [True, False])  # as Qwen3-Thinking's template; not, as DeepSeek-R1's
def test_thoughts_that_the_template_begins_are_not_begun_again_and_ended_if_it_ends_them(closes):
    tokenizer, begun, thought = make_tokenizer(), "<|im_start|>assistant\n<think>\n", "x\n</think>\n\n7"
    empty = "('<think>\\n\\n</think>\\n\\n' if message.role == 'assistant' and '</think>' not in message.content)"
    shown = f"text = {empty} ~ message.content" if closes else "text = message.content.split('</think>')[-1]"
    template = tokenizer.chat_template.replace("text = message.content", shown)
    tokenizer.chat_template = template.replace("assistant\n' }}", "assistant\n<think>\n' }}")
    answers = {thought: thought, f"<think>\n{thought}": thought, "7": "\n</think>\n\n7" if closes else "7"}
    for content, wanted in answers.items():
        prompts = Prompt("p", [said("user", "1"), said("assistant", content)]), Prompt("p", text="1", answer=content)
        for (example,) in (examples_of(prompt, tokenizer, DATA, ENDS) for prompt in prompts):
            assert trained(example, tokenizer) == f"{wanted}<|im_end|>"
            assert tokenizer.decode(example.tokens).endswith(f"{begun}{wanted}<|im_end|>")
    cut = Prompt("p", [said("user", "1"), said("assistant", "y", finish_reason="length")])
    assert trained(examples_of(cut, tokenizer, DATA, ENDS)[0], tokenizer) == "y"


@pytest.mark.parametrize("arguments", [ARGUMENTS, json.dumps(ARGUMENTS)])
def test_calls_of_tools_are_trained_and_results_are_not(arguments):
    call = said("assistant", "use it", tool_calls=[{"function": {"name": "add", "arguments": arguments}}])
    messages = [said("user", "3 + 4"), call, said("tool", "7")]
    prompt = Prompt("p", [*messages, said("assistant", "it is 7")], meta={"tools": TOOLS})
    (example,) = examples_of(prompt, TOKENIZER, DATA, ENDS)
    assert trained(example) == f"use it\n{CALL}<|im_end|>it is 7<|im_end|>"
    assert TOKENIZER.decode(example.tokens).startswith("<|im_start|>system\nTools:\n")
    (ends,) = examples_of(Prompt("p", messages[:2]), TOKENIZER, DATA, ENDS)
    assert trained(ends) == f"use it\n{CALL}<|im_end|>"


def test_variables_of_the_chat_template_reach_every_turn_and_the_system_prompt_stands_once():
    tokenizer = make_tokenizer()
    tokenizer.chat_template += "{%- if add_generation_prompt and terse -%}{{ 'short: ' }}{%- endif -%}"
    messages = [said("user", "1"), said("assistant", "a"), said("user", "2"), said("assistant", "b")]
    data = DataConfig(source="x", template_args={"terse": True}, system_prompt="be brief")
    (example,) = examples_of(Prompt("p", messages), tokenizer, data, ENDS)
    shown = tokenizer.decode(example.tokens)
    assert shown.count("assistant\nshort: ") == 2 and shown.count("brief") == 1
    assert shown.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user")
    assert trained(example, tokenizer) == "a<|im_end|>b<|im_end|>"


@pytest.mark.parametrize("tools", [json.dumps(TOOLS), [json.dumps(TOOLS[0])]])
def test_tools_may_be_text(tools):
    messages = [said("user", "1"), said("assistant", "a")]
    whole, text = (examples_of(Prompt("p", messages, meta={"tools": t}), TOKENIZER, DATA, ENDS) for t in (TOOLS, tools))
    assert whole == text and "Tools:" in TOKENIZER.decode(whole[0].tokens)


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        ("add, multiply", "prompt 'p': the column 'tools': not JSON: expected value at line 1 column 1"),
        ([3], "prompt 'p': the column 'tools': a list of tools (objects) is expected, or its JSON text, not [3]"),
        ({"a": 1}, "prompt 'p': the column 'tools': a list of tools (objects) is expected, or its JSON text, not {'a'"),
    ],
)
def test_other_tools_are_one_line(tools, says):
    prompt = Prompt("p", [said("user", "1"), said("assistant", "a")], meta={"tools": tools})
    with pytest.raises(InputError) as refused:
        examples_of(prompt, TOKENIZER, DATA, ENDS)
    assert str(refused.value).startswith(says)


@pytest.mark.parametrize(
    "beside", [{"tool_calls": [{"function": {"name": "add", "arguments": {}}}]}, {"reasoning_content": "x"}]
)
def test_a_template_without_tool_calls_or_thoughts_is_one_line(beside):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = PLAIN
    with pytest.raises(InputError) as refused:
        examples_of(Prompt("p", [said("user", "1"), said("assistant", "", **beside)]), tokenizer, DATA, ENDS)
    says = "the chat template does not render text, tool calls or thoughts within the answer"
    drop = f"leave {next(iter(beside))} out of the row, or set data.chat_template or data.template_args"
    assert str(refused.value) == f"prompt 'p': messages: {says}; {drop}"


def test_text_beside_a_call_that_the_template_leaves_out_is_refused():
    tokenizer = make_tokenizer()
    calls = [{"function": {"name": "add", "arguments": {}}}]  # Llama 3.1's template has the call in place of the text
    shown = "+ ('' if message.tool_calls else text) }}"
    tokenizer.chat_template = tokenizer.chat_template.replace("+ text }}", shown)
    silent, spoken = (Prompt("p", [said("user", "1"), said("assistant", t, tool_calls=calls)]) for t in ("", "I add."))
    assert examples_of(silent, tokenizer, DATA, ENDS)
    with pytest.raises(InputError, match="not render text"):
        examples_of(spoken, tokenizer, DATA, ENDS)


def test_the_space_that_the_template_has_before_an_answer_is_trained():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = PLAIN
    for given in ({"text": "1", "answer": "sum"}, {"messages": [said("user", "1"), said("assistant", "sum")]}):
        (example,) = examples_of(Prompt("p", **given), tokenizer, DATA, ENDS)
        assert tokenizer.decode(example.tokens) == "User: 1\nAssistant: sum<|im_end|>"
        assert trained(example, tokenizer) == " sum<|im_end|>"


def test_the_rl_parts_of_a_shared_config_do_nothing(tmp_path):
    algorithm = {"advantage": {"kind": "gae"}, "kl": {"coef": 0.1}, "modulation": None}
    config = Config(model={"path": "m"}, data={"source": "d"}, output_dir=str(tmp_path), algorithm=algorithm)
    own = SFTJob(config).config
    assert config.frozen_models and config.trained_models == 2
    assert not own.frozen_models and own.trained_models == 1
