import json
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from dynamo_megatron.config import Config, DataConfig
from dynamo_megatron.data.templates import (
    encode_prompt,
    end_token_ids,
    load_tokenizer,
    max_prompt_length,
    rendered_warning,
)
from dynamo_megatron.rollout.agents.chat_tokens import ChatTokens
from dynamo_megatron.types import Prompt

CHAT = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools\\nhere') }}{% endif %}"
    "<{{ m['role'][0] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def characters(chat_template=CHAT):
    letters = [chr(i) for i in range(32, 127)]
    vocabulary = {"?unk": 0, **{c: i + 1 for i, c in enumerate(letters)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?unk"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?unk")
    fast.chat_template = chat_template
    return fast


def rendered(prompt, chat_template=CHAT, **settings):
    tokenizer = characters(chat_template)
    tokens = encode_prompt(prompt, tokenizer, DataConfig(source="a.jsonl", **settings))
    assert isinstance(tokens, list) and all(isinstance(t, int) for t in tokens)
    return "".join(tokenizer.convert_ids_to_tokens(tokens))


TEXT = Prompt("a", text="1+1?")


def chat(**turns):
    """A conversation of one message a role."""
    return Prompt("m", messages=[{"role": role, "content": content} for role, content in turns.items()])


def test_chat_template_opens_the_assistants_turn():
    assert rendered(TEXT) == "<u>1+1?<a>"
    assert rendered(TEXT, system_prompt="Be brief.") == "<s>Be brief.<u>1+1?<a>"
    own = chat(system="S", user="U")
    assert rendered(own) == rendered(own, system_prompt="Be brief.") == "<s>S<u>U<a>"


def test_plain_template_takes_braces_as_they_are():
    latex = Prompt("a", text=r"\frac{1}{2} {prompt} {x}")
    shown = rendered(latex, template="Q: {prompt} {A}:", few_shot="Q: {x} A: 1 ")
    assert shown == r"Q: {x} A: 1 Q: \frac{1}{2} {prompt} {x} {A}:"


@pytest.mark.parametrize(
    ("prompt", "chat", "settings", "words"),
    [
        (TEXT, None, {}, "has no chat template; set data.chat_template to plain (lines of User: and Assistant:) or to"),
        (chat(tool="x"), CHAT, {}, "prompt 'm': the chat template of"),
        (chat(user="x"), CHAT, {"template": "{prompt}"}, "prompt 'm': chat"),
        (Prompt("e", text=""), CHAT, {"template": "{prompt}"}, "prompt 'e': the tokenizer gives no tokens"),
    ],
)
def test_refusals_are_one_line(prompt, chat, settings, words):
    with pytest.raises(ValueError) as error:
        rendered(prompt, chat, **settings)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_variables_of_the_chat_template():
    own = CHAT + "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}<a>{% endif %}"
    assert rendered(TEXT, own) == "<u>1+1?<a>"
    assert rendered(TEXT, own, template_args={"enable_thinking": False}) == "<u>1+1?<a><a>"
    for variables, words in [
        ({"enable_thinkng": False}, "^data.template_args: the chat template of .* has no enable_thinkng$"),
        ({"add_generation_prompt": False}, "template_args: add_generation_prompt is not for the configuration"),
    ]:
        with pytest.raises(ValueError, match=words):
            rendered(TEXT, own, template_args=variables)
    with pytest.raises(ValueError, match="template_args: goes with template 'chat'"):
        DataConfig(source="a.jsonl", template="{prompt}", template_args={"a": 1})


def test_a_template_that_prints_the_date_gives_the_same_prompt_on_every_day():
    assert rendered(TEXT, "{{ strftime_now('%d %b %Y') }}" + CHAT) == "01 Jan 2026<u>1+1?<a>"


def test_rendered_prompts_in_a_chat_template_are_noted():
    tokenizer, chat, plain = characters(), DataConfig(source="a"), DataConfig(source="a", template="{prompt}")
    one = Prompt("a", text="<u>1+1?<a>?unk", where="a.jsonl:1")
    (line,) = rendered_warning(one, tokenizer, chat)
    assert line.startswith("the text of prompt 'a' (a.jsonl:1) has ?unk") and "data.template='{prompt}'" in line
    assert rendered_warning(one, tokenizer, plain) == rendered_warning(TEXT, tokenizer, chat) == []


def test_the_limit_of_prompts_is_not_one_of_evaluated_problems():
    given = {"data": {"source": "d", "max_prompt_length": 5}, "rollout": {"max_new_tokens": 4}}
    config = Config(model={"path": "m"}, output_dir="o", eval={"max_new_tokens": 6}, **given)
    spec = SimpleNamespace(max_positions=20)
    assert [max_prompt_length(config, spec, evaluation=each) for each in (False, True)] == [5, 14]


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    (tmp_path / "config_only").mkdir()
    (tmp_path / "config_only" / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "tokenizer.json").write_text("{broken")
    for name, words in [("config_only", "has no tokenizer"), ("none", "has no tokenizer"), ("bad", "cannot load")]:
        with pytest.raises(ValueError, match=words) as error:
            load_tokenizer(str(tmp_path / name))
        assert "\n" not in str(error.value)


TURNS = Prompt("m", messages=[*chat(system="Add.", user="1+1?", assistant="2").messages, *chat(user="2+2?").messages])


def with_template(folder, prompt, chat_template, **settings):
    config = DataConfig(source="a.jsonl", chat_template=str(chat_template), **settings)
    tokenizer = load_tokenizer(folder, config.chat_template)
    return tokenizer.decode(encode_prompt(prompt, tokenizer, config)).replace("?unk", "\n").replace(" ", "")


def test_the_plain_chat_template_renders_turns_for_a_tokenizer_without_one(tmp_path):
    characters(None).save_pretrained(tmp_path)
    shown = with_template(tmp_path, TURNS, "plain")
    assert shown == "Add.\n\nUser:1+1?\nAssistant:2\nUser:2+2?\nAssistant:"
    shown = with_template(tmp_path, TEXT, "plain", system_prompt="Be brief.")
    assert shown == "Bebrief.\n\nUser:1+1?\nAssistant:"


@pytest.mark.parametrize("adds_bos", [False, True])
def test_the_plain_chat_template_begins_as_the_tokenizer_does(tmp_path, adds_bos):
    tokenizer = characters(None)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    if adds_bos:
        tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
        )
    tokenizer.save_pretrained(tmp_path)
    tokens = encode_prompt(TEXT, load_tokenizer(tmp_path, "plain"), DataConfig(source="a", chat_template="plain"))
    assert (tokens[0] == tokenizer.bos_token_id) == adds_bos and tokenizer.bos_token_id not in tokens[1:]


def test_a_text_that_has_the_bos_gets_no_second_one():
    tokenizer = characters()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    config, expected = DataConfig(source="a", template="{prompt}"), tokenizer.encode("1+1?")
    for text in ("1+1?", "<s>1+1?"):
        assert encode_prompt(Prompt("p", text=text), tokenizer, config) == expected
        assert ChatTokens(tokenizer, [2]).encode_text(text) == expected  # of an agent's /completions


def test_end_tokens_are_those_that_the_server_ends_a_response_on(tmp_path):
    tokenizer = characters()
    tokenizer.add_special_tokens({"eos_token": "</s>", "additional_special_tokens": ["<e>"]})
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert end_token_ids(tmp_path, tokenizer) == [7, 8, 9, tokenizer.eos_token_id]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<e>", "<|eom_id|>"]})
    assert tokenizer.convert_tokens_to_ids("<|eom_id|>") in end_token_ids(tmp_path, tokenizer)
    turn_end = tokenizer.convert_tokens_to_ids("<e>")
    tokenizer.chat_template = CHAT.replace(
        "{% endfor %}", "{% if m['role'] == 'assistant' %}<e>{% endif %}{% endfor %}"
    )
    ends = [tokenizer.eos_token_id]
    assert f"with <e> ({turn_end}), which is no end token" in ChatTokens(tokenizer, ends).other_end
    assert ChatTokens(tokenizer, [*ends, turn_end]).other_end is None


def test_a_file_takes_the_place_of_the_tokenizers_chat_template(tmp_path):
    characters().save_pretrained(tmp_path / "model")
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    assert with_template(tmp_path / "model", TURNS, tmp_path / "mine.jinja") == "[Add.][1+1?][2][2+2?]"
    (tmp_path / "broken.jinja").write_text("{% for m in messages %}")
    for file, words in [
        ("none.jinja", "data.chat_template: .*none.jinja: No such file"),
        ("broken.jinja", "the chat template of .*broken.jinja fails on it: TemplateSyntaxError"),
    ]:
        with pytest.raises(ValueError, match=words) as error:
            with_template(tmp_path / "model", TURNS, tmp_path / file)
        assert "\n" not in str(error.value)
