"""The unpacked SmolLM2."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dynamo_megatron.checkpoint.weights import open_weights
from dynamo_megatron.models import load_model_config

TOOL = Path(__file__).parents[2] / "tools" / "smollm2_to_hf.py"


@pytest.mark.full
def test_smollm2_knows_the_capital_of_france(tmp_path):
    out = tmp_path / "out"
    subprocess.run([sys.executable, "-P", TOOL, out], check=True)
    open_weights(out, load_model_config(out))
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0]
    answer = tokens[prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer) and answer[-1] == tokenizer.eos_token_id
