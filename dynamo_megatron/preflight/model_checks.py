"""Whether the tokenizer belongs to the model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_megatron.data.templates import end_token_ids
from dynamo_megatron.errors import InputError
from dynamo_megatron.models import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_vocabulary(path: str | os.PathLike, spec: ModelSpec, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError where a token id or an end token is beyond the embedding, or where the tokenizer does not know
    an end token, which also detects another model's smaller tokenizer, whose ids all fit. Tokens that transformers 5
    itself adds to a Qwen2 tokenizer, and that the folder's files do not name, may be beyond the embedding."""
    added = tokenizer.get_added_vocab()
    named = "".join(file.read_text(encoding="utf-8") for file in Path(path).glob("*token*.json"))
    highest = max(id for token, id in tokenizer.get_vocab().items() if token not in added or token in named)
    if highest >= spec.vocab_size:
        raise InputError(
            f"model.path: the tokenizer in {path} has ids up to {highest}, the embedding {spec.vocab_size} rows "
            "(config.json's vocab_size); it is another model's tokenizer: copy the model's own tokenizer files there"
        )
    for end in end_token_ids(path, tokenizer):
        if end >= spec.vocab_size:
            raise InputError(
                f"model.path: the end token {end} of {path} is beyond the embedding's {spec.vocab_size} rows; "
                "correct eos_token_id in generation_config.json"
            )
        if tokenizer.convert_ids_to_tokens(end) is None:
            raise InputError(
                f"model.path: the end token {end} of {path} (eos_token_id) is unknown to the tokenizer, whose ids end "
                f"at {highest}; it is another model's: copy the model's own tokenizer files there"
            )
