"""Model folders of others: no code of theirs runs, and what cannot be read is one line."""

import json
import shutil

import pytest

from dynamo_megatron.checkpoint.weights import open_weights
from dynamo_megatron.data.templates import end_token_ids, load_tokenizer
from dynamo_megatron.models import load_model_config

CODE = "from pathlib import Path\nPath({ran!r}).touch()\nclass Config: ...\nclass Model: ...\nclass Tokenizer: ...\n"
DEEP = "[" * 200_000


@pytest.fixture
def folder(tiny_model, tmp_path):
    """With a module that leaves `ran` in its place when it is imported."""
    made = tmp_path / "model"
    shutil.copytree(tiny_model(), made)
    for name in ("configuration_mine.py", "modeling_mine.py", "tokenization_mine.py"):
        (made / name).write_text(CODE.format(ran=str(tmp_path / "ran")))
    return made


def change(file, **fields) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def refusal(function, *arguments) -> str:
    with pytest.raises(ValueError) as error:
        function(*arguments)
    assert str(error.value).isprintable() and len(str(error.value)) < 1000
    return str(error.value)


def test_a_config_with_code_is_refused(folder, tmp_path):
    change(folder / "config.json", auto_map={"AutoConfig": "configuration_mine.Config"})
    assert "auto_map: " in refusal(load_model_config, folder)
    assert not (tmp_path / "ran").exists()


def test_a_tokenizer_with_code_is_not_asked_about_and_not_run(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    config = json.loads((folder / "config.json").read_text())
    for name, kind in (("Qwen2Tokenizer", "qwen2"), ("Tokenizer", "qwen2"), ("Tokenizer", "mine")):
        mine = {"auto_map": {"AutoConfig": "configuration_mine.Config"}} if kind == "mine" else {}
        (folder / "config.json").write_text(json.dumps(config | {"model_type": kind} | mine))
        auto_map = {"AutoTokenizer": ["tokenization_mine.Tokenizer", "tokenization_mine.Tokenizer"]}
        change(folder / "tokenizer_config.json", auto_map=auto_map, tokenizer_class=name)
        try:
            load_tokenizer(folder)
        except ValueError as error:
            assert "\n" not in str(error)
        assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "text", [DEEP, "{", "[]", '{"model": "\x1b[31m"}', '{"a": ' + "9" * 6000 + "}", "\ufeff{}", ""]
)
def test_a_tokenizer_that_cannot_be_read_is_one_line(folder, name, text):
    (folder / name).write_text(text)
    assert refusal(load_tokenizer, folder).startswith(f"model.path: cannot load the tokenizer of {folder}: ")


@pytest.mark.parametrize(
    "text", [DEEP, "{", "[]", '{"eos_token_id": ' + "9" * 6000 + "}", '{"eos_token_id": {"a": 1}}']
)
def test_a_generation_config_that_cannot_be_read_is_one_line(folder, text):
    tokenizer = load_tokenizer(folder)
    (folder / "generation_config.json").write_text(text)
    assert str(folder / "generation_config.json") in refusal(end_token_ids, folder, tokenizer)


@pytest.mark.parametrize("text", [DEEP, '{"model_type": ' + DEEP, '{"vocab_size": ' + "9" * 6000 + "}", "\ufeff{}"])
def test_a_config_that_cannot_be_read_is_one_line(folder, text):
    (folder / "config.json").write_text(text)
    assert refusal(load_model_config, folder).startswith(f"{folder / 'config.json'}: ")


@pytest.mark.parametrize(
    "name", ["../elsewhere.safetensors", "/etc/passwd", "..", "a/../model.safetensors", "\x1b[2J\n"]
)
def test_an_index_names_files_of_its_folder(folder, name):
    spec = load_model_config(folder)
    (folder / "model.safetensors").rename(folder.with_name("elsewhere.safetensors"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(ValueError, match=r"outside the folder|no such file"):
        open_weights(folder, spec)


def test_a_model_of_more_layers_than_there_are_is_refused(folder):
    change(folder / "config.json", num_hidden_layers=1_000_000_000)
    assert "1000000000 layers with 1 MLPs each; at most 200,000 in total are supported" in refusal(
        load_model_config, folder
    )
