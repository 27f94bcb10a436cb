"""Writes a tiny random-weight Hugging Face folder with a character tokenizer, for tests and examples.

    python -P tools/tiny_model.py OUT --family qwen3 --layers 2

`make_tiny_model` is the same as a function.
"""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from dynamo_megatron.models import FAMILIES

SPECIAL_TOKENS = ["<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"]
CHARACTERS = ["Ġ", *map(chr, range(33, 127)), "Ċ"]  # the byte-level alphabet's printable ASCII, space and newline
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ ('<|im_start|>system\n' if loop.first else '') + (tool | tojson) + '\n' }}"
    "{{ '<|im_end|>\n' if loop.last else '' }}{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '\n<tool_call>\n' + (call['function'] | tojson) + '\n</tool_call>' }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(
    out: str | Path,
    family: str = "qwen2",
    *,
    dtype: str = "float32",
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    ffn: int = 128,
    vocab: int = 128,
    max_positions: int = 2048,
    tied: bool = False,
    fields: Mapping[str, Any] | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> Path:
    """Writes config.json, generation_config.json, model.safetensors and the tokenizer into folder `out`; returns it.

    One token a character (printable ASCII and newline) besides five special ones; `vocab` counts embedding rows, at
    least 101. `head_dim` None: hidden / heads. `fields`: of config.json, in place of the others and of the family's
    `tiny`. A response ends with <|im_end|>. The same arguments give the same weights; `device` draws them. Raises
    ValueError for a vocabulary too small for the tokenizer.
    """
    tokens = SPECIAL_TOKENS + CHARACTERS
    if vocab < len(tokens):
        raise ValueError(f"vocab: {vocab} rows for a tokenizer of {len(tokens)} tokens")
    own = {**FAMILIES[family].tiny, **(fields or {})}
    general = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim or hidden // heads,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": tied,
        "rms_norm_eps": 1e-6,
        # at the usual 0.02 so narrow a model is nearly uniform, and a misplaced weight would hardly show
        "initializer_range": hidden**-0.5,
        "bos_token_id": None,
        "eos_token_id": tokens.index("<|im_end|>"),
        "pad_token_id": tokens.index("<|pad|>"),
    }
    config = AutoConfig.for_model(family, **general | own)
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            # transformers starts all norms at 1 or 0 and all biases at 0: so alike, a swapped pair would not show
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, mean=parameter[0].item(), std=0.1)
    model.to(getattr(torch, dtype)).save_pretrained(out)
    if "rope_theta" in own:  # as published files have RoPE, not as transformers 5 writes it
        file = Path(out) / "config.json"
        written = {key: value for key, value in json.loads(file.read_text()).items() if key != "rope_parameters"}
        file.write_text(json.dumps(written | own))
    special = {"eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    special["additional_special_tokens"] = ["<|endoftext|>", "<|im_start|>"]
    character_tokenizer(tokens, CHAT_TEMPLATE, **special).save_pretrained(out)
    return Path(out)


def character_tokenizer(tokens: Sequence[str], template: str, **special: Any) -> PreTrainedTokenizerFast:
    """One token a character of CHARACTERS, with a chat template. `tokens`: all, in the order of their ids; `special`:
    those of `PreTrainedTokenizerFast`."""
    characters = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[], unk_token="<unk>"))
    # Byte-level, as transformers loads the tokenizer of a Qwen folder, whatever tokenizer.json says.
    characters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    characters.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=characters, unk_token="<unk>", clean_up_tokenization_spaces=False, **special
    )
    made.chat_template = template
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="folder to write")
    for name, option in inspect.signature(make_tiny_model).parameters.items():
        if isinstance(option.default, bool):
            parser.add_argument(f"--{name}", action="store_true")
        elif name != "out":
            kind = json.loads if name == "fields" else str if isinstance(option.default, str) else int
            allowed = list(FAMILIES) if name == "family" else None
            parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=option.default, choices=allowed)
    print(make_tiny_model(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
