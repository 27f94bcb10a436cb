"""Checks the model's folder: config, weights, tokenizer, context length."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dynamo_megatron.checkpoint.safetensors_folder import SafetensorsFolder, is_finite
from dynamo_megatron.checkpoint.weights import open_weights
from dynamo_megatron.data.limits import max_prompt_length
from dynamo_megatron.data.templates import end_token_ids
from dynamo_megatron.errors import InputError
from dynamo_megatron.evaluation.overlap import problem_text
from dynamo_megatron.models import ModelSpec
from dynamo_megatron.models.mapping import huggingface_names, parameter_names, to_huggingface, to_megatron
from dynamo_megatron.planning.formulas import model_elements
from dynamo_megatron.preflight.findings import Finding, note, ok, skipped
from dynamo_megatron.preflight.subject import Subject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def model_config(subject: Subject) -> Iterator[Finding]:
    """The model that config.json describes."""
    spec = subject.spec
    yield ok(f"{spec.family}, {spec.num_layers} layers, {model_elements(spec):,} parameters")


def weights(subject: Subject) -> Iterator[Finding]:
    """Checks every file of the index, and every tensor's name and shape by the files' headers."""
    with open_weights(subject.config.model.path, subject.spec) as folder:
        names = folder.names
    yield ok(f"{len(names)} tensors, every name and shape as Megatron needs it")


def round_trip(subject: Subject) -> Iterator[Finding]:
    """Converts the first and the last layer from Hugging Face's tensors to tensor-parallel shards and back, and checks
    that they are bit-identical."""
    spec, tp = subject.spec, subject.config.parallel.tp
    spec.check_parallel(tp, 1)
    layers = sorted({0, spec.num_layers - 1})
    with open_weights(subject.config.model.path, spec) as folder:
        if not isinstance(folder, SafetensorsFolder):
            yield skipped("a Megatron checkpoint is loaded as it is, without conversion")
            return
        done = 0
        for name in parameter_names(spec):
            if not any(name.startswith(f"decoder.layers.{layer}.") for layer in layers):
                continue
            tensors = {n: folder.get(n) for n in huggingface_names(spec, name)}
            shards = [to_megatron(spec, name, list(tensors.values()), rank, tp) for rank in range(tp)]
            for n, back in to_huggingface(spec, name, shards).items():
                if not is_finite(tensors[n]):
                    raise InputError(f"{folder.path}: tensor {n} holds NaN or infinity; download the model again")
                if back.dtype != tensors[n].dtype or not torch.equal(back, tensors[n]):
                    raise InputError(
                        f"{folder.path}: tensor {n} does not survive the way to Megatron's shards and back under "
                        f"parallel.tp {tp}; report this model's config.json as an issue"
                    )
                done += 1
    yield ok(f"{done} tensors of layers {', '.join(map(str, layers))} bit-equal after Megatron and back, tp {tp}")


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


UNUSED_SHARE = 0.2  # of the embedding's rows may belong to no token; published models pad by a few per cent at most


SAMPLE = "What is 12 * (3 + 4)? So x = 84."


def _decoded(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    return tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)).strip()


def vocabulary(subject: Subject) -> Iterator[Finding]:
    """Checks the tokenizer's size against the embedding, and that encoding and decoding preserve text."""
    spec, path, tokenizer = subject.spec, subject.config.model.path, subject.tokenizer
    check_vocabulary(path, spec, tokenizer)
    size = len(tokenizer.get_vocab())
    if size < (1 - UNUSED_SHARE) * spec.vocab_size and spec.vocab_size - size > 128:
        raise InputError(
            f"model.path: the tokenizer in {path} has {size:,} tokens, the embedding {spec.vocab_size:,} rows, far "
            "more than a padding; it is another model's tokenizer: copy the model's own tokenizer files there"
        )
    # A model for one task (like the demo's) may have no tokens for other text than the task's.
    prompt = problem_text(subject.prompts[0]).strip()
    survives = {text: _decoded(tokenizer, text) for text in (SAMPLE, prompt)}
    if not any(back == text for text, back in survives.items()):
        raise InputError(
            f"model.path: the tokenizer in {path} turns {SAMPLE!r} into {survives[SAMPLE]!r} and does not keep the "
            "first prompt either; its files belong to another tokenizer class: copy tokenizer.json and "
            "tokenizer_config.json from the model again"
        )
    if survives[SAMPLE] != SAMPLE:
        yield note(
            f"the tokenizer keeps the first prompt, but turns {SAMPLE!r} into {survives[SAMPLE]!r}: right for a model "
            "of the data's characters alone"
        )
    ends = [f"{i} {tokenizer.convert_ids_to_tokens(i)}" for i in end_token_ids(path, tokenizer)]
    yield ok(f"{size:,} tokens for {spec.vocab_size:,} rows; a response ends with {', '.join(ends)}")


def template(subject: Subject) -> Iterator[Finding]:
    """Shows the first prompt with the chat template applied."""
    tokens = subject.encode(subject.prompts[0])
    text = subject.tokenizer.decode(tokens)
    shown = text if len(text) <= 160 else f"{text[:80]} ... {text[-80:]}"
    yield ok(f"{len(tokens)} tokens for the first prompt: {shown!r}")


def context_length(subject: Subject) -> Iterator[Finding]:
    """Checks that prompt and response together fit the model's length."""
    config, spec = subject.config, subject.spec
    limit = max_prompt_length(config, spec)
    used = limit + config.rollout.max_new_tokens
    yield ok(f"prompts of {limit} and responses of {config.rollout.max_new_tokens} tokens fit {spec.max_positions}")
    if used < (config.model.max_length or 0):
        yield note(f"model.max_length {config.model.max_length} is more than prompt and response can have ({used})")
